"""Several completions of one HTTP request, run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from router.text.completion import Completion
from router.text.events import Event, Summary

_MAX_QUEUED = 64  # events; a slow client holds the completions up, not our memory

NumberedEvents = AsyncIterator[tuple[int, Event]]


@asynccontextmanager
async def run_all(completions: Sequence[Completion]) -> AsyncIterator[NumberedEvents]:
    """Hold all of them for as long as the block lasts. Gives their events, each with its completion's number.

    The first that fails ends the rest, and its error is raised.
    """
    if len(completions) == 1:  # the usual case needs neither a task nor a queue
        async with completions[0].run() as events:
            yield _number(events)
        return
    queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue(_MAX_QUEUED)
    tasks = [asyncio.ensure_future(_pump(number, one, queue)) for number, one in enumerate(completions)]
    try:
        yield _drain(queue, len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _number(events: AsyncIterator[Event]) -> NumberedEvents:
    async for event in events:
        yield 0, event


async def _pump(number: int, completion: Completion, queue: asyncio.Queue[tuple[int, Event | Exception]]) -> None:
    try:
        async with completion.run() as events:
            async for event in events:
                await queue.put((number, event))
    except Exception as error:  # carried to the one who reads the queue, and raised there
        await queue.put((number, error))


async def _drain(queue: asyncio.Queue[tuple[int, Event | Exception]], num_running: int) -> NumberedEvents:
    while num_running:
        number, event = await queue.get()
        if isinstance(event, Exception):
            raise event
        num_running -= isinstance(event, Summary)
        yield number, event
