"""The generated stubs are those of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    sources = [f"proto/{path.name}" for path in sorted((_ROOT / "proto").glob("*.proto"))]
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Icore/rpc=proto", *out, *sources]
    subprocess.run(command, cwd=_ROOT, check=True, timeout=60)
    made = sorted((tmp_path / "core" / "rpc").iterdir())
    assert len(made) == 3 * len(sources)
    for path in made:
        assert path.read_text() == (_ROOT / "core" / "rpc" / path.name).read_text(), f"{path.name}: run `make proto`"
