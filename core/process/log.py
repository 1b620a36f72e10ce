"""Log file of a process, on its own node. It outlives the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

_MAX_READ_BYTES = 1 << 20  # per read; longer tails are truncated at their start


@dataclass(frozen=True)
class LogPart:
    """Part of a log and its end offset, from which the next read can continue."""

    text: str
    end: int  # bytes


def log_path(log_dir: str, replica: str, rank: int) -> Path:
    """Return the log path of a rank on its node."""
    return Path(log_dir) / f"{replica}-r{rank}.log"


def find_logs(log_dir: str, who: str) -> list[Path]:
    """Return the logs on this node of the processes whose names begin with `who` and a hyphen."""
    return list(Path(log_dir).glob(f"{who}-*.log"))


def clear_logs(log_dir: str) -> None:
    shutil.rmtree(log_dir, ignore_errors=True)
    Path(log_dir).mkdir(parents=True, exist_ok=True, mode=0o700)


def redirect_output(path: Path, *, who: str) -> None:
    """Append everything that this process prints or logs to `path`, crash output of native code included.

    who: prefix of every logged line.
    """
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
    """Return the last `lines` lines or, with `start`, everything from that byte on. A missing log reads as empty."""
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
