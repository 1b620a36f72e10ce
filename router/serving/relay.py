"""One request carried through, from one attempt to the next, until every choice of it has finished.

A request that fails on its way goes on elsewhere from prompt + tokens so far. Sampling depends on (seed, position)
only, so the continuation is the one that would have come anyway, and no token is sent twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.words.errors import ClusterError, DeadlineExceeded
from cluster.words.request import SampledToken, SequenceRequest
from router.generation import ChoiceToken, Generation, RequestRoute
from router.serving.attempt import Attempt
from router.serving.pair import Pair

if TYPE_CHECKING:
    from router.serving.dispatch import Dispatch

logger = logging.getLogger(__name__)

# Attempts in a row that hardly brought anything. A request that is itself what kills replicas takes no more than so
# many along; one that has come further since the last failure may fail as often again.
_MAX_FRUITLESS = 5
_PROGRESS = 8  # tokens
_BACKOFF_S, _MAX_BACKOFF_S = 0.01, 1.0


class Relay:
    """Implements router.generation.Generation: a task that serves the request, and the tokens that it has brought."""

    def __init__(self, dispatch: Dispatch, request: SequenceRequest) -> None:
        self.route = RequestRoute()
        self._dispatch = dispatch
        self._request = request
        self._started_at = time.monotonic()
        self._tokens: dict[int, list[int]] = {choice: [] for choice in request.choices}
        self._unfinished = set(request.choices)
        self._lost_at: dict[int, float] = {}  # choices that have tokens, and wait for the first of another attempt
        self._attempts: dict[int, Attempt] = {}  # of each choice, the one that serves it now
        self._outbox: asyncio.Queue[ChoiceToken | ClusterError | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Generation:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[ChoiceToken]:
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, ClusterError):
                raise item
            yield item

    async def stop(self, choice: int) -> None:
        self._unfinished.discard(choice)
        if attempt := self._attempts.get(choice):
            await attempt.stop(choice)

    @property
    def _remaining_s(self) -> float | None:
        """Until the request's deadline; None where it has none. Raises DeadlineExceeded when that has passed."""
        if self._request.deadline_s is None:
            return None
        remaining_s = self._request.deadline_s - (time.monotonic() - self._started_at)
        if remaining_s <= 0:
            raise DeadlineExceeded(f"request {self._request.id}: not finished within {self._request.deadline_s:g} s")
        return remaining_s

    async def _run(self) -> None:
        try:
            request = self._continuation(self._request.choices)
            pair = await self._dispatch.admit(request)
            self._dispatch.admitted(time.monotonic() - self._started_at)
            await self._serve(self._request.choices, pair)
            self._dispatch.finished([len(tokens) for tokens in self._tokens.values()])
        except* ClusterError as errors:
            self._outbox.put_nowait(_first(errors))
        except* Exception as errors:  # the edge of this task: no answer must look like an empty one
            logger.exception("request=%s failed", self._request.id)
            self._outbox.put_nowait(ClusterError(f"internal error: {errors.exceptions[0]!r}"))
        finally:
            self._outbox.put_nowait(None)

    async def _serve(
        self, choices: tuple[int, ...], pair: Pair | None = None, *, avoid: frozenset[str] = frozenset()
    ) -> None:
        """Bring these choices to their end; after a failure, those that have tokens go on one by one.

        `pair`: for the first attempt, where it is chosen already.
        """
        used = set(avoid)
        fruitless = 0
        for attempt in itertools.count(1):
            num_tokens = self._num_tokens(choices)
            try:
                return await self._attempt(choices, pair, avoid=used)
            except ClusterError as error:
                fruitless = 0 if self._num_tokens(choices) >= num_tokens + _PROGRESS else fruitless + 1
                if fruitless == _MAX_FRUITLESS or not self._dispatch.may_try_again(error, used):
                    raise
                logger.warning("request=%s goes on elsewhere: %s", self._request.id, error)
            pair = None
            choices = tuple(choice for choice in choices if choice in self._unfinished)
            self._lost_at = {c: time.monotonic() for c in choices if self._tokens[c]} | self._lost_at
            if len(choices) > 1 and self._num_tokens(choices):
                async with asyncio.TaskGroup() as group:
                    for choice in choices:
                        group.create_task(self._serve((choice,), avoid=frozenset(used)))
                return
            if not choices:
                return
            await asyncio.sleep(min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** min(attempt, 10)))

    async def _attempt(self, choices: tuple[int, ...], pair: Pair | None, *, avoid: set[str]) -> None:
        """One try. Adds to `avoid` the replicas on which it may have failed, if it fails."""
        self.route.attempts += 1
        self.route.migrations += self._num_tokens(choices) > 0
        request = self._continuation(choices)
        try:
            pair = pair or await self._dispatch.choose(request, avoid=avoid)
            await self._try(request, pair, avoid=avoid)
        finally:
            if pair:
                self._dispatch.give_back(pair)

    async def _try(self, request: SequenceRequest, pair: Pair, *, avoid: set[str]) -> None:
        used = {replica.id for replica in (pair.prefill, pair.decode) if replica}

        def next_prefill() -> Pair | None:
            other = self._dispatch.next_prefill(request, pair.decode, avoid=avoid | used)
            used.update([other.prefill.id] if other and other.prefill else [])
            return other

        attempt = Attempt(
            request,
            pair,
            router=self._dispatch.router,
            route=self.route,
            emit=self._emit,
            next_prefill=next_prefill,
            next_place=lambda: self._dispatch.next_place(request),
        )
        self._attempts |= dict.fromkeys(request.choices, attempt)
        settle = self._dispatch.expect(pair)
        try:
            with self._dispatch.running(attempt.places):
                await attempt.run()
        except ClusterError:
            avoid |= used - attempt.blameless
            raise
        finally:
            settle()

    def _continuation(self, choices: tuple[int, ...]) -> SequenceRequest:
        """What is still to be done for these choices, which have equally many tokens: one choice, or none yet."""
        return replace(
            self._request,
            token_ids=self._request.token_ids + tuple(self._tokens[choices[0]]),
            choices=choices,
            stream=self._dispatch.new_streams(len(choices)),
            deadline_s=self._remaining_s,
        )

    def _num_tokens(self, choices: tuple[int, ...]) -> int:
        return sum(len(self._tokens[choice]) for choice in choices)

    def _emit(self, choice: int, token: SampledToken) -> None:
        if (lost_at := self._lost_at.pop(choice, None)) is not None:
            self._log_pause(choice, time.monotonic() - lost_at)
        self._tokens[choice].append(token.token_id)
        if token.finish_reason:
            self._unfinished.discard(choice)
        self._outbox.put_nowait(ChoiceToken(choice, token))

    def _log_pause(self, choice: int, pause_s: float) -> None:
        logger.info(
            "request=%s choice=%d went on pause_ms=%.0f prefill=%s decode=%s tokens=%d cached=%d pulled=%d attempts=%d",
            self._request.id,
            choice,
            pause_s * 1e3,
            self.route.prefill_replica,
            self.route.decode_replica,
            len(self._request.token_ids) + len(self._tokens[choice]),
            self.route.cached_tokens,
            self.route.pulled_tokens,
            self.route.attempts,
        )


def _first(errors: BaseExceptionGroup[ClusterError]) -> ClusterError:
    """The first error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ClusterError)
    return error
