"""Output file of `cluster capture stop`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.app import run
from tests.cluster.cli.conftest import Control

TRACE = b'{"timestamp": 0.0}\n'


@pytest.fixture(autouse=True)
def controlled(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake controller with a capture of TRACE."""

    def answer(method: str, *args: Any) -> Any:
        if method == "read_capture":
            return TRACE[args[0] :]
        return {"seconds": 1.0, "requests": 1, "bytes": len(TRACE), "is_full": False}

    control(answer)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("was", [None, "open to others, and longer than what comes"])
def test_file_is_private(tmp_path: Path, was: str | None) -> None:
    path = tmp_path / "traffic.jsonl"
    if was:
        path.write_text(was)
        path.chmod(0o644)
    assert run(["capture", "stop", "-o", str(path)]) == 0
    assert path.read_bytes() == TRACE and path.stat().st_mode & 0o777 == 0o600


def test_output_can_be_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert run(["capture", "stop", "-o", str(path)]) == 0
    assert os.read(reader, 1000) == TRACE
    os.close(reader)


def test_failed_write_keeps_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["capture", "stop", "-o", str(tmp_path)]) != 0
    assert capsys.readouterr().err.endswith(": Is a directory; the recording continues\n")
