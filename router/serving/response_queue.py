"""The tokens of one request on their way to its client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from core.types.request import SampledToken
from router.generation import Taker

_TOGETHER = 64  # some 1 ms of work for a door


class Outbox:
    """What has come while nobody took is taken together: by a client that is behind, or a busy router. Belongs to the
    event loop; one iterates over it."""

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens
        # Who has what comes while the iteration waits: to wake that costs a token as much again as its text.
        self.taker: Taker | None = None
        self._bundles: deque[dict[int, list[SampledToken]]] = deque()  # by choice; all but the last are full
        self._num_in_last = 0
        self._is_over = False
        self._is_broken = False  # the taker has raised: what came then is lost, and nothing may follow it
        self._errors: list[Exception] = []  # one at most, until it is raised: it knows by then who took
        self._loop = asyncio.get_running_loop()
        self._waking: asyncio.Future[None] | None = None  # of who waits; an Event would cost each token twice as much

    def put(self, choice: int, tokens: Sequence[SampledToken]) -> None:
        """At least one, which have come together."""
        if self._is_broken:
            return
        if self.taker and self._waking and not self._waking.done():
            self._hand_over(self.taker, choice, tokens)
            return
        for token in tokens:
            if not self._bundles or self._num_in_last == _TOGETHER:
                self._open_bundle()
            self._bundles[-1].setdefault(choice, []).append(token)
            self._num_in_last += 1
        self.num_waiting += len(tokens)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more come. The first word counts."""
        if not self._is_over:
            self._is_over = True
            self._errors = [error] if error else []
            self._wake()

    def __aiter__(self) -> Outbox:
        return self

    async def __anext__(self) -> dict[int, list[SampledToken]]:
        """By choice, at least one token; or nothing, where the taker says that there is more to do. Raises the error
        with which it ended, once, after the last token. Where much waits, other requests have their turn before it is
        given."""
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

    def _hand_over(self, taker: Taker, choice: int, tokens: Sequence[SampledToken]) -> None:
        try:
            if taker(choice, tokens):
                return
        except Exception as error:  # it is whoever iterates to whom this happens, and not who brings tokens
            self._is_broken = True
            return self.end(error)
        self._open_bundle()  # an empty one; what comes before it is given joins it
        self._wake()

    def _open_bundle(self) -> None:
        self._bundles.append({})
        self._num_in_last = 0

    def _wake(self) -> None:
        if self._waking and not self._waking.done():
            self._waking.set_result(None)
