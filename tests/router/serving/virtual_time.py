"""An event loop whose clock stands still while anybody has something to do, and then jumps to whoever is next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Seconds of it take no time. What would wait for ever raises instead."""

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


async def pass_time(seconds: float) -> None:
    """A sleep in virtual time, which says nothing of how quick a machine is."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    await asyncio.sleep(seconds)


async def until(condition: Callable[[], object]) -> None:
    """Let time pass until this holds."""
    for _ in range(10_000):
        if condition():
            return
        await pass_time(0.001)
    raise AssertionError("it never comes")
