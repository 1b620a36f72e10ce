"""Queue of the tokens of one request, on their way to its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from core.types.request import SampledToken
from router.generation import InlineSink

_TOGETHER = 64  # some 1 ms of work for a door


class ResponseQueue:
    """Bundles the tokens that arrive while the client is behind or the router is busy. Belongs to the event loop; one
    task iterates over it."""

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens
        # Called inline while the consumer is suspended; saves one task wakeup per token, as dear as its text.
        self.sink: InlineSink | None = None
        self._bundles: deque[dict[int, list[SampledToken]]] = deque()  # by choice; all but the last are full
        self._num_in_last = 0
        self._is_over = False
        self._is_broken = False  # the sink has raised; its tokens are lost, and none may follow
        self._errors: list[Exception] = []  # one at most, until it is raised: its traceback refers to the consumer
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.Future[None] | None = None  # the consumer; an Event would cost twice as much per token

    def put(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        """Append tokens that arrived together, at least one."""
        if self._is_broken:
            return
        if self.sink and self._waking and not self._waking.done():
            self._hand_over(self.sink, choice, tokens)
            return
        for token in tokens:
            if not self._bundles or self._num_in_last == _TOGETHER:
                self._open_bundle()
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
        """Return at least one token, by choice; or none, where the sink has asked for a wakeup. Raises the error of
        `end`, once, after the last token. Where much waits, other tasks run first."""
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

    def _hand_over(self, sink: InlineSink, choice: int, tokens: Sequence[SampledToken]) -> None:
        try:
            if sink(choice, tokens):
                return
        except Exception as error:  # belongs to the consumer, not to the replica's reader
            self._is_broken = True
            return self.end(error)
        self._open_bundle()  # empty; tokens that arrive before it is returned join it
        self._wake()

    def _open_bundle(self) -> None:
        self._bundles.append({})
        self._num_in_last = 0

    def _wake(self) -> None:
        if self._waking and not self._waking.done():
            self._waking.set_result(None)
