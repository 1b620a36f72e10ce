"""A public class name stands once in the tree, and no module or folder is a drawer for odds and ends."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.rooms import modules

_GENERATED = "cluster.rpc"
_DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}

# Names that still stand twice: whoever renames one takes it off this list.
_KNOWN_TWICE: set[str] = set()


def test_every_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for name, path in modules().items():
        if not name.startswith(_GENERATED):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    new = {name: where for name, where in twice.items() if name not in _KNOWN_TWICE}
    assert not new, f"choose another word for one of them: {new}"
    assert not _KNOWN_TWICE - twice.keys(), f"take off the list: {_KNOWN_TWICE - twice.keys()}"


def test_modules_are_nouns_and_folders_one_level_deep() -> None:
    for name in modules():
        assert not _DRAWERS.intersection(name.split(".")), f"{name}: name it by the one thing that is in it"
        assert name.count(".") <= 2, f"{name}: one folder level inside a package"
