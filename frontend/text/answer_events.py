"""Event stream of one completion: tokens, detokenized and cut at stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SampledToken
from frontend.text.choice_text import ChoiceText
from frontend.text.events import Event, Summary
from frontend.text.slow_client import UnreadLimit
from frontend.text.token_timing import TokenClock
from router.generation import Generation

_ACCOUNT_S = 1.0  # maximum wait for the route summary after the last token


class AnswerEvents:
    """Iterator over batches of events, for one task. Not a generator: each generator and each event loop step per
    token costs as much as the token's text (docs/benchmarks/router.md)."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[ChoiceText],
        *,
        clock: TokenClock,
        unread: UnreadLimit,
        summary: Callable[[], Summary],
        request_id: str,
    ) -> None:
        self._generation = generation
        self._tokens = aiter(generation)
        self._choices = choices
        self._num_open = len(choices)
        self._clock = clock
        self._unread = unread
        self._summary = summary
        self._is_summed = False
        self._request_id = request_id
        self._unneeded: list[int] = []  # choices ended by a stop string, not yet stopped on the workers

    def __aiter__(self) -> AnswerEvents:
        return self

    async def __anext__(self) -> list[Event]:
        """Return at least one event: deltas of choices, each choice's end, and at last the summary alone.

        Raises ClusterError.
        """
        self._unread.consumed()
        events: list[Event] = []
        while not events:
            while self._unneeded:
                await self._generation.stop(self._unneeded.pop())
            if not self._num_open:
                events = [await self._end()]
                break
            try:
                arrived = await anext(self._tokens)
            except StopAsyncIteration:
                raise ReplicaLost(f"request {self._request_id}: the token stream ended before the answer did") from None
            for number, tokens in arrived.items():
                events += self._events_of(number, tokens)
        self._unread.given()
        return events

    def _events_of(self, number: int, tokens: Sequence[SampledToken]) -> list[Event]:
        choice = self._choices[number]
        if choice.finished is not None:
            return []  # tokens in flight when the choice was stopped
        delta = choice.add(tokens)
        self._clock.tick(number, len(delta.tokens))
        if choice.finished is None:
            return [delta]
        self._num_open -= 1
        if delta.tokens[-1].finish_reason is None:
            self._unneeded.append(number)
        return [delta, choice.finished]

    async def _end(self) -> Summary:
        if self._is_summed:
            raise StopAsyncIteration
        self._is_summed = True
        with suppress(ClusterError, TimeoutError):  # all choices have ended, so the request cannot fail
            async with asyncio.timeout(_ACCOUNT_S):
                async for _ in self._tokens:
                    pass
        return self._summary()
