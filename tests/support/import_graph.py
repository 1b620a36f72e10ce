"""Import graph of the product's packages. `python -m tests.support.import_graph` draws the packages and their arrows.

An arrow is any import: at the top of a module, inside a function, under TYPE_CHECKING, or by a name in a string
(`import_module("a.b")`, `"a.b:name"`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

# From the ground up. A package imports those on lower levels only; packages of one level do not import each other.
LEVELS = (
    ("core",),
    ("engine", "router"),
    ("kvtransfer", "frontend"),
    ("worker",),
    ("prefill_worker", "decode_worker", "planner"),
    ("cluster",),
)
PACKAGES = tuple(package for level in LEVELS for package in level)

_NAMED = re.compile(r"([a-z_]\w*(?:\.\w+)+):\w+")  # "frontend.service:build"


@functools.cache
def modules() -> dict[str, Path]:
    """Return the path of every module by name; a package's `__init__` has the package's name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return {name: {to for to in imported if to != name} for name, (imported, _) in _read().items()}


def named_in_strings() -> dict[str, set[str]]:
    """Return the modules that each module names as "a.b:name" in a string, to be imported later by name."""
    return {name: named for name, (_, named) in _read().items() if named}


def cycles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the strongly connected components of more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for to in graph.get(node, ()):
            if to not in index:
                visit(to)
                low[node] = min(low[node], low[to])
            elif to in stack:
                low[node] = min(low[node], index[to])
        if low[node] == index[node]:
            start = stack.index(node)
            component = stack[start:]
            del stack[start:]
            if len(component) > 1:
                found.append(tuple(sorted(component)))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found)


def arrows() -> Counter[tuple[str, str]]:
    """Count the imports from package to package."""
    return Counter(
        (importer.partition(".")[0], to.partition(".")[0])
        for importer, imported in imports().items()
        for to in imported
        if importer.partition(".")[0] != to.partition(".")[0]
    )


def picture() -> str:
    """Draw one line per level, the highest first: each package, and the packages that it imports."""
    found = arrows()
    lines = []
    for number, level in reversed(list(enumerate(LEVELS))):
        for package in level:
            below = " ".join(to for to in PACKAGES if found[package, to])
            lines.append(f"{number}  {package:15} imports {below}".rstrip().removesuffix(" imports"))
    return "\n".join(lines)


@functools.cache
def _read() -> dict[str, tuple[set[str], set[str]]]:
    """Return what each module imports, and what it names in strings. The trees are not kept: they are large."""
    found = {}
    for name, path in modules().items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found[name] = set(_imported(nodes)), set(_named(nodes))
    return found


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Import(names=names):
                candidates = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                candidates = [f"{module}.{alias.name}" for alias in names]
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name)), *_]):
                candidates = [name]
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                candidates = [name]
            case _:
                continue
        for name in candidates:
            module = name if name in modules() else name.rpartition(".")[0]
            if module in modules():
                yield module


def _named(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for name in _NAMED.findall(node.value) if name in modules())


if __name__ == "__main__":
    print(picture())
