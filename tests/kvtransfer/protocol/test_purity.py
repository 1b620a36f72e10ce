"""Protocol modules are pure: they import no locks, clocks, networking or torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvtransfer.protocol

_IMPURE = ("threading", "queue", "asyncio", "time", "grpc", "google.protobuf", "core.rpc", "torch")
_MODULES = sorted(Path(kvtransfer.protocol.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_protocol_module_imports_are_pure(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    impure = {name for name in imported if f"{name}.".startswith(tuple(f"{module}." for module in _IMPURE))}
    assert not impure
