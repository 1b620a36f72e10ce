"""Restarting and reporting of supervised tasks."""

from __future__ import annotations

import asyncio

import pytest

from core.process.supervisor import Supervisor


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
