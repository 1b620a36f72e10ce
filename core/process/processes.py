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
_BEGIN_S = 1.0  # from the end of the old program to the beginning of the new one, on a machine with much else to do
_IS_OF_THE_KERNEL = 0x00200000  # PF_KTHREAD, in the flags of a process


def marked(mark: str) -> list[int]:
    """Living processes that were started with `mark`, a NAME=VALUE, in their environment."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if has_mark(pid, mark)]


def has_mark(pid: int, mark: str) -> bool:
    """Whether this process lives, and was started with `mark`."""
    path = Path(f"/proc/{pid}")
    try:
        return mark.encode() in _environment(path).split(b"\0") and _is_alive(path)
    except OSError:  # it ended meanwhile, or it belongs to somebody else
        return False


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


def _environment(path: Path) -> bytes:
    """Raises OSError where it may not be read.

    While a process takes up a new program its environment reads as empty, though whoever started it has been told
    already that it has: that moment is waited for.
    """
    give_up_at = time.monotonic() + _BEGIN_S
    while True:
        was_beginning = _is_beginning(path)
        environment = (path / "environ").read_bytes()
        if environment or not was_beginning or time.monotonic() > give_up_at:
            return environment
        time.sleep(0.001)


def _is_beginning(path: Path) -> bool:
    """Whether it has no program yet, thus no place where its environment ends."""
    stat = _stat(path)
    return stat[0] not in ("Z", "X") and stat[48] == "0" and not int(stat[6]) & _IS_OF_THE_KERNEL


def _is_alive(path: Path) -> bool:
    return _stat(path)[0] not in ("Z", "X")


def _stat(path: Path) -> list[str]:
    """The fields after the command's name, which may itself contain anything."""
    return (path / "stat").read_text().rpartition(")")[2].split()
