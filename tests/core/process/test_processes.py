"""Processes: found and ended by their mark, commanded as children; and supervised tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from core.process import processes
from core.process.child_process import ChildProcess
from core.process.supervisor import Supervisor
from core.types.errors import ReplicaLost

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


def test_commands_are_answered_in_order_until_the_process_exits() -> None:
    process = ChildProcess("tests.core.process.counting_child", "40", answer_s=30.0)
    try:
        process.tell("add", number=1)
        process.tell("add", number=1)
        assert (process.answer(), process.answer()) == (41, 42)
        with pytest.raises(ReplicaLost, match="has exited"):
            process.ask("leave")
        with pytest.raises(ReplicaLost, match="has exited"):
            while True:  # the first commands may still fit into a buffer
                process.tell("add", number=1)
        with pytest.raises(ReplicaLost, match="has exited"):
            process.answer()
    finally:
        process.close()


async def test_dead_task_is_logged_counted_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    deaths: list[str] = []
    supervisor = Supervisor(died=deaths.append, first_pause_s=0.0)
    lives, goes_on = 0, asyncio.Event()

    async def work() -> None:
        nonlocal lives
        lives += 1
        if lives == 1:
            raise ValueError("a bug")
        if lives == 2:
            return  # ending without an error counts as a death, too
        goes_on.set()
        await asyncio.Event().wait()

    supervisor.start("tidy", work)
    await asyncio.wait_for(goes_on.wait(), 10)
    assert deaths == ["tidy", "tidy"] and supervisor.failing == []
    assert "task tidy died" in caplog.text and "a bug" in caplog.text and "task tidy ended" in caplog.text
    await supervisor.close()


async def test_task_that_keeps_dying_is_reported_as_failing() -> None:
    died = asyncio.Event()

    def count(name: str) -> None:
        if supervisor.failing:
            died.set()

    supervisor = Supervisor(died=count, first_pause_s=0.0)

    async def work() -> None:
        raise ValueError("for ever")

    task = supervisor.start("hopeless", work)
    supervisor.start("well", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.wait_for(died.wait(), 10)
    assert supervisor.failing == ["hopeless"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert supervisor.failing == []
    await supervisor.close()


@pytest.mark.parametrize("error", [None, ConnectionError("while it was cancelled")])
async def test_cancelled_task_is_not_restarted_even_if_it_swallows_the_cancellation(error: Exception | None) -> None:
    supervisor, lives, has_begun = Supervisor(first_pause_s=0.0), 0, asyncio.Event()

    async def work() -> None:
        nonlocal lives
        lives += 1
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error:
                raise error from None

    task = supervisor.start("stubborn", work)
    await has_begun.wait()
    task.cancel()
    await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 10)
    assert lives == 1
    await supervisor.close()
