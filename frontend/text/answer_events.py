"""What comes of one completion: tokens → characters → stop strings → events, those together that come together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SampledToken
from frontend.text.choice_text import ChoiceText
from frontend.text.events import Event, Summary
from frontend.text.slow_client import UnreadLimit
from frontend.text.token_timing import TokenClock
from router.generation import Generation

_ACCOUNT_S = 1.0  # for which the account of a request's route may come after its last token


class AnswerEvents:
    """Iterated over in one task. An iterator and no generator, and one step of the event loop for all that has come:
    each generator, and each step, that a token has to pass costs as much as its text (docs/benchmarks/router.md)."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[ChoiceText],
        *,
        clock: TokenClock,
        unread: UnreadLimit,
        summary: Callable[[], Summary],
        request_id: str,
        straight: Callable[[Event], bool] | None = None,
    ) -> None:
        """straight: takes an event at once, if it can. What it takes is not given to whoever iterates, who is woken for
        the rest alone."""
        self._generation = generation
        if straight:
            generation.set_sink(partial(self._send, straight))
        self._tokens = aiter(generation)
        self._choices = choices
        self._num_open = len(choices)
        self._clock = clock
        self._unread = unread
        self._summary = summary
        self._is_summed = False
        self._request_id = request_id
        self._unsent: list[Event] = []
        self._unneeded: list[int] = []  # choices that a stop string has ended; the workers do not know yet

    def __aiter__(self) -> AnswerEvents:
        return self

    async def __anext__(self) -> list[Event]:
        """At least one. Of each choice its deltas, then its end; after all of them, alone, the summary.

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
                raise ReplicaLost(f"request {self._request_id}: its tokens ended before it was finished") from None
            events, self._unsent = self._unsent, []
            for number, tokens in arrived.items():
                events += self._events_of(number, tokens)
        self._unread.given()
        return events

    def _send(self, straight: Callable[[Event], bool], number: int, tokens: Sequence[SampledToken]) -> bool:
        """While whoever iterates waits. Whether there is nothing that he has to see to."""
        for event in self._events_of(number, tokens):
            if self._unsent or not straight(event):
                self._unsent.append(event)
        return not self._unsent and not self._unneeded and self._num_open > 0

    def _events_of(self, number: int, tokens: Sequence[SampledToken]) -> list[Event]:
        choice = self._choices[number]
        if choice.finished is not None:
            return []  # they were on their way when we said stop
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
        with suppress(ClusterError, TimeoutError):  # what has come to its end cannot fail any more
            async with asyncio.timeout(_ACCOUNT_S):
                async for _ in self._tokens:
                    pass
        return self._summary()
