"""Event loop in virtual time: the clock stands still while tasks are ready, then jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose sleeps take no real time. An endless wait raises instead."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


class _Clock(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        return []


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorator of an async test that runs in virtual time."""

    @wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(**given))

    return run


async def pass_time(seconds: float) -> None:
    """Sleep in virtual time, independently of the machine's speed."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    await asyncio.sleep(seconds)


async def until(condition: Callable[[], object]) -> None:
    """Let virtual time pass until the condition holds."""
    for _ in range(10_000):
        if condition():
            return
        await pass_time(0.001)
    raise AssertionError("it never comes")
