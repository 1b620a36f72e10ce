"""Timeout for clients that do not read their answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TypeVar

from core.types.errors import ClientTooSlow

T = TypeVar("T")

_CHECKS = 4  # checks per limit


class UnreadLimit:
    """Ends its `async with` block with ClientTooSlow, wherever it waits, if a given event is not consumed in time.
    Enter it once, in the consuming task."""

    def __init__(self, limit_s: float, *, request_id: str) -> None:
        self._limit_s = limit_s
        self._request_id = request_id
        self.is_passed = False  # valid after the block
        self._scope: asyncio.Timeout | None = (
            None  # set within the block only: it refers to the task and so to the request
        )
        self._given_at: float | None = None  # None: the consumer waits for an event
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> UnreadLimit:
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        self._check()
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
        """Note that an event was handed to the consumer."""
        self._given_at = self._loop.time()

    def consumed(self) -> None:
        """Note that the consumer asks for the next event."""
        self._given_at = None

    async def watched(self, events: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield the same events; asking for the next one marks the previous one as consumed."""
        async for event in events:
            self.given()
            yield event
            self.consumed()

    def _check(self) -> None:
        # Polled: setting a timer for each token would cost more than the token.
        now = self._loop.time()
        if self._scope and self._given_at is not None and now - self._given_at > self._limit_s:
            self._scope.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._limit_s / _CHECKS, self._check)
