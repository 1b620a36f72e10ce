"""Polling for conditions without an event: in another process, or on a thread.

Wait for an event (`Replicas.changed`, a task, a future) where there is one. The deadline only ends a test that would
hang; it does not measure speed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 60.0
_LOOK_S = 0.01


def until(condition: Callable[[], T], *, within_s: float = WITHIN_S, look_s: float = _LOOK_S) -> T:
    """Block until `condition()` is true and return its value. Raises AssertionError with the last value."""
    end_at, pause = time.monotonic() + within_s, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end_at, f"not true within {within_s:g} s; last value: {value!r}"
        pause.wait(look_s)
    return value


async def becomes(condition: Callable[[], T], *, within_s: float = WITHIN_S) -> T:
    """Like `until`, without blocking the event loop."""
    end_at = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end_at, f"not true within {within_s:g} s; last value: {value!r}"
        await asyncio.sleep(_LOOK_S)
    return value


async def told(ask: Callable[[], Awaitable[T]], *, within_s: float = WITHIN_S) -> T:
    """Like `becomes`, for an async condition."""
    end_at = time.monotonic() + within_s
    while not (value := await ask()):
        assert time.monotonic() < end_at, f"not true within {within_s:g} s; last value: {value!r}"
        await asyncio.sleep(_LOOK_S)
    return value


async def stays(condition: Callable[[], object], *, for_s: float) -> None:
    """Assert that a condition holds at every poll for `for_s` seconds. A slow machine polls less often."""
    end_at = time.monotonic() + for_s
    while time.monotonic() < end_at:
        assert condition()
        await asyncio.sleep(_LOOK_S)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work`, which does not end by itself, until the block ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
