"""Who may import whom (docs/ARCHITECTURE.md §3): no arrow runs up or sideways, lazy imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_FLOORS = {
    "cluster": set(),
    "engine": {"cluster"},
    "kvtransfer": {"cluster", "engine"},
    "prefill_worker": {"cluster", "engine", "kvtransfer"},
    "decode_worker": {"cluster", "engine", "kvtransfer"},
    "router": {"cluster"},
}
# The simulator runs the engine's own schedulers and blocks; the router that serves does not know it.
_SIMULATOR = "simulator"
# What a floor must be able to do without, on a machine where it is not installed.
_NEVER_LOADED = {
    "cluster": {"torch", "transformers"},
    "router": {"torch", "transformers"},
    "engine": {"ray", "redis", "grpc", "pydantic", "msgspec", "transformers", "gguf"},
    "kvtransfer": {"ray", "redis", "pydantic", "msgspec", "transformers", "gguf"},
}


def _modules(package: str) -> list[Path]:
    return sorted((_ROOT / package).rglob("*.py"))


def _imported(path: Path) -> set[str]:
    """The top-level names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", _FLOORS)
def test_no_arrow_runs_up_or_sideways(package: str) -> None:
    for path in _modules(package):
        allowed = _FLOORS[package] | {package} | ({"engine"} if path.parent.name == _SIMULATOR else set())
        wrong = _imported(path) & set(_FLOORS) - allowed
        assert not wrong, f"{path.relative_to(_ROOT)} imports {wrong}"


@pytest.mark.parametrize("package", _NEVER_LOADED)
def test_a_floor_loads_without_what_it_must_not_need(package: str) -> None:
    paths = [path.relative_to(_ROOT) for path in _modules(package) if path.name not in ("__init__.py", "__main__.py")]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    program = f"import sys; [__import__(name) for name in {names}]; print(*{_NEVER_LOADED[package]} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


def test_proto_holds_no_python() -> None:
    """A package of that name would shadow proto-plus, which Ray's dependencies import as `proto`."""
    assert {path.suffix for path in (_ROOT / "proto").iterdir()} == {".proto"}
    import proto

    assert hasattr(proto, "Message")
