"""The log of a process: one file, on the process's own node, that outlives it."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

_MAX_READ_BYTES = 1 << 20  # of one answer; a tail longer than this is cut at its head


@dataclass(frozen=True)
class LogPart:
    """A piece of a log and where it ends, so that the next piece can begin there."""

    text: str
    end: int  # bytes


def log_path(log_dir: str, replica: str, rank: int) -> Path:
    """Where the rank writes, on its own node."""
    return Path(log_dir) / f"{replica}-r{rank}.log"


def find_logs(log_dir: str, who: str) -> list[Path]:
    """On this node, those of the processes called `who`-…."""
    return list(Path(log_dir).glob(f"{who}-*.log"))


def clear_logs(log_dir: str) -> None:
    """Begin with an empty directory."""
    shutil.rmtree(log_dir, ignore_errors=True)
    Path(log_dir).mkdir(parents=True, exist_ok=True, mode=0o700)


def redirect_output(path: Path, *, who: str) -> None:
    """Send everything that this process prints or logs to `path`, behind what is there: what native code writes as it
    crashes, too. `who` stands in every line that is logged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {who} %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def read_log(path: Path, *, lines: int = 50, start: int | None = None) -> LogPart:
    """The last `lines` lines, or, with `start`, what has been written since that byte. A log not yet there is empty."""
    if not path.exists():
        return LogPart("", 0)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(size - _MAX_READ_BYTES, 0) if start is None else min(start, size)
        file.seek(begin)
        data = file.read(_MAX_READ_BYTES)
    end = begin + len(data)
    if start is None:
        data = b"".join(data.splitlines(keepends=True)[-lines:]) if lines else b""
    return LogPart(data.decode(errors="replace"), end)
