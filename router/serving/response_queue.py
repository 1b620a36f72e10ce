"""Queue of one request's tokens, from the replicas to the frontend."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from core.types.request import SampledToken

_TOGETHER = 64  # about 1 ms of work for an endpoint


class ResponseQueue:
    """Queue of one request's tokens; each iteration returns up to 64 waiting tokens.

    Belongs to the event loop, and has one consumer.
    """

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens
        self._bundles: deque[dict[int, list[SampledToken]]] = deque()  # by choice; all but the last are full
        self._num_in_last = 0
        self._is_over = False
        # At most one error, dropped when it is raised: its traceback refers to this queue.
        self._errors: list[Exception] = []
        self._loop = asyncio.get_running_loop()
        # Set while the consumer waits. An Event would cost twice as much per token.
        self._waking: asyncio.Future[None] | None = None

    def put(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        """Append one or more tokens of a choice."""
        for token in tokens:
            if not self._bundles or self._num_in_last == _TOGETHER:
                self._bundles.append({})
                self._num_in_last = 0
            self._bundles[-1].setdefault(choice, []).append(token)
            self._num_in_last += 1
        self.num_waiting += len(tokens)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """Close the queue. Idempotent; the first error wins."""
        if not self._is_over:
            self._is_over = True
            self._errors = [error] if error else []
            self._wake()

    def __aiter__(self) -> ResponseQueue:
        return self

    async def __anext__(self) -> dict[int, list[SampledToken]]:
        """Return at least one token, by choice. After the last token, raises the queue's error once, if it has one.

        Between two full bundles it yields to the event loop, so that other requests get their turn.
        """
        if len(self._bundles) > 1:
            await asyncio.sleep(0)
        if not self._bundles and not self._is_over:
            self._waking = self._loop.create_future()
            try:
                await self._waking
            finally:
                self._waking = None
        if not self._bundles:
            if self._errors:
                raise self._errors.pop()
            raise StopAsyncIteration
        bundle = self._bundles.popleft()
        self.num_waiting -= sum(map(len, bundle.values()))
        return bundle

    def _wake(self) -> None:
        if self._waking and not self._waking.done():
            self._waking.set_result(None)
