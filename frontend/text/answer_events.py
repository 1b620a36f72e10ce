"""Event stream of one completion, detokenized and cut at stop strings, with its latencies and its unread limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from types import TracebackType
from typing import TypeVar

from core.types.errors import ClientTooSlow, ClusterError, ReplicaLost
from core.types.request import SampledToken
from frontend.text.choice_text import ChoiceText
from frontend.text.events import Delta, Event, Finished, Summary
from router.generation import Generation
from router.telemetry.metrics import Metrics

T = TypeVar("T")

_ACCOUNT_S = 1.0  # maximum wait for the route summary after the last token
_CHECKS = 4  # checks per limit


@dataclass(eq=False)
class AnswerEvents:
    """Iterator over batches of events, for one task. Not a generator: one more generator, or one more event loop step,
    per token would cost as much as the token's text (docs/benchmarks/router.md)."""

    generation: Generation
    choices: Sequence[ChoiceText]
    clock: TokenClock
    unread: UnreadLimit
    summary: Callable[[], Summary]
    request_id: str

    def __post_init__(self) -> None:
        self._tokens = aiter(self.generation)
        self._num_open = len(self.choices)
        self._is_summed = False
        self._unneeded: list[int] = []  # choices ended by a stop string, not yet stopped on the workers

    def __aiter__(self) -> AnswerEvents:
        return self

    async def __anext__(self) -> list[Event]:
        """Return at least one event: deltas of choices, each choice's end, and at last the summary alone.

        Raises ClusterError.
        """
        self.unread.consumed()
        events: list[Event] = []
        while not events:
            while self._unneeded:
                await self.generation.stop(self._unneeded.pop())
            if not self._num_open:
                events = [await self._end()]
                break
            try:
                arrived = await anext(self._tokens)
            except StopAsyncIteration:
                raise ReplicaLost(f"request {self.request_id}: the token stream ended before the answer did") from None
            for number, tokens in arrived.items():
                events += self._events_of(number, tokens)
        self.unread.given()
        return events

    def _events_of(self, number: int, tokens: Sequence[SampledToken]) -> list[Event]:
        choice = self.choices[number]
        if choice.finished is not None:
            return []  # tokens in flight when the choice was stopped
        delta = choice.add(tokens)
        self.clock.tick(number, len(delta.tokens))
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
        return self.summary()


class TokenClock:
    """Clock started at a request's arrival. Observes the latency of each token and keeps the means."""

    def __init__(self, metrics: Metrics, *, num_choices: int) -> None:
        self._metrics = metrics
        self._observe, self._count = metrics.inter_token_latency.observe, metrics.generated_tokens.inc
        self.began = monotonic()
        self._last: list[float | None] = [None] * num_choices  # arrival of each choice's last token
        self._gaps_s = 0.0  # the sum over all choices
        self._num_gaps = 0
        self.ttft_s = 0.0  # 0 before the first token

    @property
    def elapsed_s(self) -> float:
        return monotonic() - self.began

    @property
    def itl_s(self) -> float:
        """Mean inter-token latency in seconds; 0 if no choice has two tokens."""
        return self._gaps_s / self._num_gaps if self._num_gaps else 0.0

    def tick(self, choice: int, num_tokens: int = 1) -> None:
        """Record tokens of a choice that arrived together, now."""
        now = monotonic()
        self._count(num_tokens)
        last, self._last[choice] = self._last[choice], now
        if self.ttft_s == 0.0:
            self.ttft_s = now - self.began
            self._metrics.time_to_first_token.observe(self.ttft_s)
        if last is not None:
            gap_s = now - last
            self._gaps_s += gap_s
            self._num_gaps += 1
            self._observe(gap_s)
        if num_tokens > 1:
            self._num_gaps += num_tokens - 1
            self._observe(0.0, num_tokens - 1)


class UnreadLimit:
    """Context manager that ends its block with ClientTooSlow if the consumer leaves an event unread for the limit.
    Enter it once, in the consuming task."""

    def __init__(self, limit_s: float, *, request_id: str) -> None:
        self._limit_s = limit_s
        self._request_id = request_id
        self.is_passed = False  # valid after the block
        # Set within the block only, because it refers to the task, and the task to the request.
        self._scope: asyncio.Timeout | None = None
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


async def best_of(
    events: AsyncIterator[list[Event]], *, num_best: int, shows_logprobs: bool
) -> AsyncIterator[list[Event]]:
    """Yield the events of the best choices, renumbered, once all choices have ended; then the summary.

    events: their tokens must have logprobs, which are removed unless shows_logprobs.
    """
    collected: dict[int, list[Delta | Finished]] = {}
    async for arrived in events:
        for event in arrived:
            if isinstance(event, Delta | Finished):
                collected.setdefault(event.choice, []).append(event)
                continue
            best = sorted(collected, key=lambda choice: (-_mean_logprob(collected[choice]), choice))
            for number, choice in enumerate(best[:num_best]):
                yield [_shown(one, number, shows_logprobs=shows_logprobs) for one in collected[choice]]
            yield [event]


def _mean_logprob(events: list[Delta | Finished]) -> float:
    found = [t.logprob.logprob for one in events if isinstance(one, Delta) for t in one.tokens if t.logprob]
    return sum(found) / len(found)


def _shown(event: Delta | Finished, number: int, *, shows_logprobs: bool) -> Event:
    if isinstance(event, Finished) or shows_logprobs:
        return replace(event, choice=number)
    return replace(event, choice=number, tokens=[replace(token, logprob=None) for token in event.tokens])
