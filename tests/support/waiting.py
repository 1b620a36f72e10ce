"""Waiting for what nobody announces: a condition in another process, or on a thread that has no event for it.

Where there is an event (`Replicas.changed`, a task, a future), wait for that. The deadline ends a test that would hang:
no test says by it how quick something is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

WITHIN_S = 60.0
_LOOK_S = 0.01


def until(condition: Callable[[], T], *, within_s: float = WITHIN_S, look_s: float = _LOOK_S) -> T:
    """Block until `condition()` is true, and return it. Raises AssertionError, with what it was last."""
    end_at, pause = time.monotonic() + within_s, threading.Event()
    while not (value := condition()):
        assert time.monotonic() < end_at, f"not within {within_s:g} s; {value!r} is what it was last"
        pause.wait(look_s)
    return value


async def becomes(condition: Callable[[], T], *, within_s: float = WITHIN_S) -> T:
    """As `until`, while the event loop goes on."""
    end_at = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end_at, f"not within {within_s:g} s; {value!r} is what it was last"
        await asyncio.sleep(_LOOK_S)
    return value


async def told(ask: Callable[[], Awaitable[T]], *, within_s: float = WITHIN_S) -> T:
    """As `becomes`, of what has to be asked for."""
    end_at = time.monotonic() + within_s
    while not (value := await ask()):
        assert time.monotonic() < end_at, f"not within {within_s:g} s; {value!r} is what it was last"
        await asyncio.sleep(_LOOK_S)
    return value


async def stays(condition: Callable[[], object], *, for_s: float) -> None:
    """A condition holds whenever it is looked at, for so long. A slow machine looks less often."""
    end_at = time.monotonic() + for_s
    while time.monotonic() < end_at:
        assert condition()
        await asyncio.sleep(_LOOK_S)
