"""GPU tests run on a foreign image: `-m gpu` needs few packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parent.parent
_WARNED = """
import warnings
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("module", ["theirs.part", "engine.part"])
def test_warned_by(module):
    warnings.warn_explicit("of old age", DeprecationWarning, "part.py", 1, module=module)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Test suite with our settings: one file for a GPU, and one that cannot be imported here."""
    (tmp_path / "conftest.py").write_text((_ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_warned.py").write_text(_WARNED)
    (tmp_path / "test_of_more.py").write_text("import what_is_not_there\n")
    return tmp_path


def _run(suite: Path, *arguments: str) -> tuple[int, str]:
    program = [sys.executable, "-m", "pytest", "-c", str(_ROOT / "pyproject.toml"), "--rootdir", str(suite)]
    away = ["-p", "no:asyncio", "-p", "no:cacheprovider", "-rA"]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [*program, *away, *arguments, str(suite)], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_warnings_of_others_pass_and_modules_without_gpu_tests_are_not_imported(suite: Path) -> None:
    code, output = _run(suite, "-m", "gpu")
    assert code == 1, output
    assert re.findall(r"(PASSED|FAILED) .*\[(\w+)\.part\]", output) == [("PASSED", "theirs"), ("FAILED", "engine")]
    assert "what_is_not_there" not in output
    assert "what_is_not_there" in _run(suite)[1]
