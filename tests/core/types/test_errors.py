"""The error tree is complete, in one file, and drawn in its docstring."""

from __future__ import annotations

import ast

from core.types import errors
from tests.support.import_graph import modules

_OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ClusterError)
}


def test_every_error_is_in_the_tree() -> None:
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and name != errors.__name__:
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert not bases & (_OURS | {"Exception"}), f"{name}.{node.name} must be defined in {errors.__name__}"


def test_docstring_shows_the_tree() -> None:
    assert errors.__doc__
    drawn: list[tuple[int, str]] = []  # (depth, name) of the enclosing lines
    for line in errors.__doc__.splitlines()[2:]:
        name = line.lstrip("│├└─ ").split()[0]
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        drawn = [(at, above) for at, above in drawn if at < depth] + [(depth, name)]
        parents = [kind.__name__ for kind in getattr(errors, name).__mro__ if issubclass(kind, errors.ClusterError)]
        assert parents[::-1] == [above for _, above in drawn], line
    named = {line.lstrip("│├└─ ").split()[0] for line in errors.__doc__.splitlines()[2:]}
    assert named == _OURS
