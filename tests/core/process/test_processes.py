"""Finding and terminating processes by their mark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from core.process import processes

# A leader and a child in a process group of its own; both print when they are ready. `stubborn` ignores SIGTERM.
_PROGRAM = """
import signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"], process_group=0)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = f"XPYD_TEST={uuid.uuid4()}"
    yield mark
    processes.end(mark, grace_s=0)


def start(mark: str, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start a leader; return it and its child's pid."""
    name, _, value = mark.partition("=")
    leader = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout is not None
    with leader.stdout:
        return leader, int(leader.stdout.readline())


def test_all_marked_processes_are_found(mark: str) -> None:
    leader, child = start(mark)
    assert sorted(processes.marked(mark)) == sorted([leader.pid, child])
    assert processes.leader(mark) == leader.pid
    assert processes.marked(mark + "x") == [] and processes.leader("XPYD_TEST") is None
    processes.end(mark, grace_s=0.2)
    assert processes.marked(mark) == [] and leader.wait(5) == -signal.SIGTERM


def test_process_is_found_during_exec(mark: str) -> None:
    # Popen returns a moment before the child's environment is readable.
    name, _, value = mark.partition("=")
    for _ in range(200):
        child = subprocess.Popen(["sleep", "60"], env={**os.environ, name: value})
        try:
            assert processes.has_mark(child.pid, mark)
        finally:
            child.kill()
            child.wait()


def test_process_that_ignores_sigterm_is_killed(mark: str) -> None:
    leader, child = start(mark, "stubborn")
    assert sorted(processes.end(mark, grace_s=0.2)) == sorted([leader.pid, child])
    assert leader.wait(5) == -signal.SIGKILL and processes.marked(mark) == []


def test_processes_without_a_leader_are_killed_at_once(mark: str) -> None:
    leader, child = start(mark)
    leader.kill()
    leader.wait(5)
    assert processes.leader(mark) is None
    assert processes.end(mark, grace_s=60) == [child]
    assert processes.marked(mark) == []


def test_process_is_identified_by_pid_and_start_time(mark: str) -> None:
    leader, _ = start(mark)
    began = processes.start_time(leader.pid)
    assert began is not None and began == processes.start_time(leader.pid)
    processes.end(mark, grace_s=0.2)
    leader.wait(5)
    assert processes.start_time(leader.pid) is None
