"""The import graph of the six packages, by module and by room. `python -m tests.rooms` prints rooms, arrows and floors.

A room is a folder of a package; a module at a package's root is a room of its own. An arrow is any import: at the top,
inside a function, under TYPE_CHECKING, or by a name in a string (`import_module("a.b")`, `"a.b:name"`).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("cluster", "engine", "kvtransfer", "prefill_worker", "decode_worker", "router")

Graph = Mapping[str, set[str]]

_BY_PATH = re.compile(r"([a-z_]\w*(?:\.\w+)+):\w+")  # "router.app:build"


@functools.cache
def modules() -> dict[str, Path]:
    """Every module, by name; a package's `__init__` under the package's name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str) -> str:
    is_folder = modules()[module].name == "__init__.py"
    return module if is_folder or module.count(".") < 2 else module.rpartition(".")[0]


@functools.cache
def module_arrows() -> dict[str, set[str]]:
    """module -> the modules that it imports."""
    return {name: {to for to in _imported(path) if to != name} for name, path in modules().items()}


@functools.cache
def paths_in_strings() -> dict[str, set[str]]:
    """module -> the modules that it names in strings; these are no arrows but where they are started."""
    found = {name: set(_named_in_strings(path)) for name, path in modules().items()}
    return {name: named for name, named in found.items() if named}


def room_arrows() -> dict[str, set[str]]:
    """room -> the rooms that its modules import. The packages' own empty `__init__` are no rooms."""
    found: dict[str, set[str]] = {room_of(name): set() for name in modules() if name not in PACKAGES}
    for name, imported in module_arrows().items():
        if name not in PACKAGES:
            found[room_of(name)] |= {room_of(to) for to in imported if to not in PACKAGES} - {room_of(name)}
    return found


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """The strongly connected parts with more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_nodes: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        open_nodes.append(node)
        for to in graph.get(node, ()):
            if to not in index:
                visit(to)
                low[node] = min(low[node], low[to])
            elif to in open_nodes:
                low[node] = min(low[node], index[to])
        if low[node] == index[node]:
            place = open_nodes.index(node)
            part = open_nodes[place:]
            del open_nodes[place:]
            if len(part) > 1:
                found.append(tuple(sorted(part)))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found)


def floors(arrows: Graph) -> list[list[str]]:
    """Rooms from the ground up: each on the lowest floor that is above all that it imports, but for its circle."""
    circle_of = {room: circle for circle in circles(arrows) for room in circle}

    @functools.cache
    def floor(room: str) -> int:
        return max((floor(to) + 1 for to in arrows[room] if to not in circle_of.get(room, ())), default=0)

    found: list[list[str]] = [[] for _ in range(max(map(floor, arrows)) + 1)]
    for room in sorted(arrows):
        found[floor(room)].append(room)
    return found


def picture(arrows: Graph) -> str:
    """The floors as text, the highest first; a room stands under its package."""
    lines = []
    for number, rooms in reversed(list(enumerate(floors(arrows)))):
        lines += _wrap(f"{number:2}  ", _by_package(rooms))
    return "\n".join(lines)


def entry(room: str, imported: Iterable[str]) -> str:
    """One row of the table in test_floors.py."""
    return "\n".join(_wrap(f"{room}: ", _by_package(imported))).rstrip()


def parse_table(text: str) -> dict[str, set[str]]:
    """What entry() has written, row below row: room -> rooms."""
    found = {}
    for row in re.split(r"\n(?=\S)", text.strip()):
        room, _, imported = row.partition(":")
        assert room not in found, f"{room} has two rows"
        found[room] = {
            f"{package}.{name}"
            for package, names in re.findall(r"(\w+)\(([^)]*)\)", imported)
            for name in names.split()
        }
    return found


def _by_package(rooms: Iterable[str]) -> list[str]:
    """`cluster(wire words)`, package by package."""
    names: dict[str, list[str]] = {package: [] for package in PACKAGES}
    for room in sorted(rooms):
        package, _, name = room.partition(".")
        names[package].append(name)
    return [f"{package}({' '.join(found)})" for package, found in names.items() if found]


def _wrap(head: str, words: list[str], *, width: int = 116) -> list[str]:
    lines = [head]
    for word in words:
        for part in word.split():
            if len(lines[-1]) + len(part) > width:
                lines.append("    ")
            lines[-1] += part + " "
    return [line.rstrip() if line.strip() else line for line in lines]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from _owner(name)


def _named_in_strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            yield from (name for part in node.args if isinstance(part, ast.Constant) for name in _owner(part.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (name for match in [_BY_PATH.fullmatch(node.value)] if match for name in _owner(match[1]))


def _owner(name: str) -> list[str]:
    """The module of ours in which `name` is; none when it is not ours."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return [name] if name else []


if __name__ == "__main__":
    known = room_arrows()
    print("\n".join(entry(room, known[room]) for room in sorted(known)))
    print()
    for circle in circles(module_arrows()) + circles(known):
        print("circle:", *circle)
    print(picture(known))
