"""How long an answer may wait for a client that does not read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TypeVar

from core.types.errors import ClientTooSlow

T = TypeVar("T")

_LOOKS = 4  # within the limit


class UnreadLimit:
    """Ends its `async with` block by ClientTooSlow, wherever it waits, where something that was given is not
    consumed in time. Entered once, in the task that consumes."""

    def __init__(self, limit_s: float, *, request_id: str) -> None:
        self._limit_s = limit_s
        self._request_id = request_id
        self.is_passed = False  # known at the end of the block
        self._scope: asyncio.Timeout | None = None  # within the block: it knows the task, which knows the whole request
        self._given_at: float | None = None  # None: whoever consumes waits for more
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> UnreadLimit:
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
        scope, self._scope = self._scope, None
        assert scope
        self.is_passed = scope.expired()
        try:
            await scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ClientTooSlow(f"request {self._request_id}: not read for {self._limit_s:g} s") from None

    def given(self) -> None:
        """Something goes to whoever consumes."""
        self._given_at = self._loop.time()

    def consumed(self) -> None:
        """Whoever consumes comes for more."""
        self._given_at = None

    async def watched(self, events: AsyncIterator[T]) -> AsyncIterator[T]:
        """The same. Whoever comes for the next one has consumed the one before."""
        async for event in events:
            self.given()
            yield event
            self.consumed()

    def _look(self) -> None:
        """A timer that is set for each token would cost more than the token."""
        now = self._loop.time()
        if self._scope and self._given_at is not None and now - self._given_at > self._limit_s:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s / _LOOKS, self._look)
