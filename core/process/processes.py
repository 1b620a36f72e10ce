"""Processes of this machine, read from /proc, and grouped by a mark in their environment.

Sessions and process groups do not find every descendant of a program: a child may leave them. The initial environment
stays readable and is inherited. Only processes of our own user are visible.

psutil is not used: Ray's processes overwrite the first variables of their environment with a title, and psutil reads no
further. Its import also costs every command 70 ms.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

# Signals that end a command, besides Ctrl-C.
ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_PAUSE_S = 0.02
_KILL_S = 5.0  # a process in disk wait does not die at once
_BEGIN_S = 1.0  # limit of an exec on a busy machine
_ENDED = ("Z", "X")  # states
_IS_OF_THE_KERNEL = 0x00200000  # PF_KTHREAD in a process's flags


def marked(mark: str) -> list[int]:
    """Return the live processes that were started with `mark`, a NAME=VALUE, in their environment."""
    return [pid for pid in _pids() if has_mark(pid, mark)]


def has_mark(pid: int, mark: str) -> bool:
    """Return whether the process is alive and was started with `mark`."""
    try:
        return mark.encode() in _environment(pid).split(b"\0") and _stat(pid)[0] not in _ENDED
    except OSError:  # it has exited, or belongs to another user
        return False


def leader(mark: str) -> int | None:
    """Return the session leader among the marked processes, which was started first; None if it has exited."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                return pid
    return None


def end(mark: str, *, grace_s: float) -> list[int]:
    """Terminate every process that carries `mark`. Returns the pids that had to be killed.

    The leader receives SIGTERM and has `grace_s` to end the others and itself. Remaining processes are killed; without
    a leader, all at once.
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


def stopped() -> list[int]:
    """Return the processes that a signal (SIGSTOP) has stopped."""
    return [pid for pid in _pids() if _state(pid) == "T"]


def start_time(pid: int) -> int | None:
    """Return a process's start time in ticks since boot, which together with the pid is unique; None if it exited."""
    try:
        return int(_stat(pid)[19])
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """Return the live direct children of a process."""
    found = []
    for other in _pids():
        with contextlib.suppress(OSError):
            stat = _stat(other)
            if int(stat[1]) == pid and stat[0] not in _ENDED:
                found.append(other)
    return found


def title(pid: int) -> str:
    """Return the command line or the title that replaced it; empty if the process has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _environment(pid: int) -> bytes:
    """Read the environment. Raises OSError if it is not readable.

    During an exec the environment reads as empty although the parent's call has returned already; this waits for the
    end of the exec.
    """
    give_up_at = time.monotonic() + _BEGIN_S
    while True:
        stat = _stat(pid)
        # In the middle of an exec, without an environment yet.
        is_beginning = stat[0] not in _ENDED and stat[48] == "0" and not int(stat[6]) & _IS_OF_THE_KERNEL
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if environment or not is_beginning or time.monotonic() > give_up_at:
            return environment
        time.sleep(0.001)


def _state(pid: int) -> str:
    try:
        return _stat(pid)[0]
    except OSError:  # it has exited
        return ""


def _stat(pid: int) -> list[str]:
    """Return the fields after the command name, which may contain any character."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]
