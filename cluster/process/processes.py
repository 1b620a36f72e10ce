"""The processes of this machine, read from /proc: whose children they are by the mark in their environment.

A session or a process group is not enough to find all that a program has started: each may leave it. The environment
with which a process was started stays readable and goes on to its children. Only our own user's processes are seen.

Not by psutil: a process that gives itself a title, as Ray's do, overwrites the first variables of its environment, and
psutil reads no further. It also costs every command 70 ms to import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_PAUSE_S = 0.02
_KILL_S = 5.0  # one that waits for a disk does not die at once


def marked(mark: str) -> list[int]:
    """Living processes that were started with `mark`, a NAME=VALUE, in their environment."""
    wanted = mark.encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or it belongs to somebody else
            if wanted in (path / "environ").read_bytes().split(b"\0") and _is_alive(path):
                found.append(int(path.name))
    return found


def leader(mark: str) -> int | None:
    """The one among them that leads their session: the first to be started. None when that has ended."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                return pid
    return None


def end(mark: str, *, grace_s: float) -> list[int]:
    """End every process that carries `mark`; returns those that had to be forced.

    The leader is asked, and has `grace_s` to end the others and itself; what is left then, or has no leader, is killed.
    """
    first = leader(mark)
    if first is not None:
        _signal([first], signal.SIGTERM)
    deadline = time.monotonic() + (grace_s if first is not None else 0.0)
    while (forced := marked(mark)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    deadline = time.monotonic() + _KILL_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return forced


def start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; with the pid it names one process for ever. None: there is none."""
    try:
        return int(_stat(Path(f"/proc/{pid}"))[19])
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """Living processes that it has started itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(_stat(path)[1]) == pid and _is_alive(path):
                found.append(int(path.name))
    return found


def title(pid: int) -> str:
    """Its command line, or what it has put in its place; "" when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def resident_bytes(pid: int) -> int:
    """Its memory that is in RAM; 0 when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_alive(path: Path) -> bool:
    return _stat(path)[0] not in ("Z", "X")


def _stat(path: Path) -> list[str]:
    """The fields after the command's name, which may itself contain anything."""
    return (path / "stat").read_text().rpartition(")")[2].split()
