"""Relay of one request from attempt to attempt, until every choice has finished.

A request whose replicas fail continues elsewhere from its prompt and its tokens so far. Sampling depends on (seed,
position) only, so the continuation is the same, and no token is sent twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Set
from time import monotonic

from core.types.errors import (
    CapacityError,
    ClientTooSlow,
    ClusterError,
    DeadlineExceeded,
    GrammarNotFollowed,
    NoTokenAllowed,
    RequestError,
)
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import SequenceRequest
from core.types.revisions import RevisionCounts
from core.types.timeline import RequestPhase
from router.generation import Arrived, Generation
from router.routing.chooser import Culprit
from router.serving.admission import Admission
from router.serving.attempt import Attempt
from router.serving.decode_streams import DecodeStreams
from router.serving.request_state import RequestState
from router.serving.reservations import Pair, Reservations

logger = logging.getLogger(__name__)

# Consecutive attempts with little progress after which a request fails. It bounds the number of replicas that a request
# can crash; progress since the last failure resets the count.
_MAX_FRUITLESS = 5
_PROGRESS = 8  # tokens
_BACKOFF_S, _BACKOFF_GROWTH = 0.02, 4  # per fruitless attempt: five of them outlast a fault of a few seconds
_BLAME_S = 10.0  # time for which the request avoids a replica or link that failed
_MAX_TROUBLE = 200  # characters kept of an attempt's error
_NO_FAULT = (RequestError, CapacityError, DeadlineExceeded, ClientTooSlow, GrammarNotFollowed, NoTokenAllowed)


class Relay:
    """Implementation of router.generation.Generation: the task that serves a request, and its tokens."""

    def __init__(
        self,
        request: SequenceRequest,
        admission: Admission,
        reservations: Reservations,
        *,
        begin: Callable[[RequestState, SequenceRequest, Pair, Set[Culprit]], Attempt],
        running: set[DecodeStreams],
        counts_of: Callable[[int | None], RevisionCounts],
        answered: Callable[[RequestState, int | None], None],
    ) -> None:
        """begin: creates an attempt; its last argument is the set of culprits to avoid. running: running attempts of
        all requests. counts_of: returns the counters of a revision. answered: called with each finished request and the
        revision that served it."""
        self._answered = answered
        self._state = RequestState(request)
        self.route, self.life = self._state.route, self._state.life
        self._admission = admission
        self._reservations = reservations
        self._begin = begin
        self._running = running
        self._counts_of = counts_of
        self._attempts: dict[int, Attempt] = {}  # current attempt of each choice
        self._failed: dict[Culprit, float] = {}  # time of the last failure
        self._now = asyncio.get_running_loop().time
        self._revision: int | None = None  # revision that served it last; None while there is only one
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Generation:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Drop the task: its exception keeps this frame alive (reference cycle).
        task, self._task = self._task, None
        assert task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def __aiter__(self) -> AsyncIterator[Arrived]:
        # Returned directly: an async generator around it would add its cost to every token.
        return self._state.responses

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return self._state.prompt_logprobs

    async def stop(self, choice: int) -> None:
        if attempt := self._attempts.get(choice):
            await attempt.stop(choice)
        else:
            self._state.unfinished.discard(choice)

    async def _run(self) -> None:
        state, began_at = self._state, monotonic()
        try:
            async with self._admission.admit(state.request) as pair:
                state.life.add(RequestPhase.QUEUE, "", began_at)
                await self._serve(state.request.choices, pair)
        except* ClusterError as errors:
            state.responses.end(_first(errors))
        except* Exception as errors:  # without an error, the client would see an empty answer
            logger.exception("request=%s failed", state.request.id)
            state.responses.end(ClusterError(f"internal error: {errors.exceptions[0]!r}"))
        finally:
            # Also reached if the client has the last token and cancels the task before it ends by itself.
            if not state.unfinished:
                self._reservations.finished([len(tokens) for tokens in state.tokens.values()])
                self._answered(state, self._revision)
            state.responses.end()

    async def _serve(self, choices: tuple[int, ...], pair: Pair | None = None) -> None:
        """Serve these choices to their end. After a failure, choices with tokens continue separately.

        pair: replicas for the first attempt, if already chosen.
        """
        state = self._state
        fruitless = 0
        while True:
            num_tokens = state.num_tokens(choices)
            try:
                return await self._attempt(choices, pair)
            except ClusterError as error:
                fruitless = 0 if state.num_tokens(choices) >= num_tokens + _PROGRESS else fruitless + 1
                if fruitless == _MAX_FRUITLESS or not self._reservations.may_try_again(error, self._culprits()):
                    raise
                logger.warning("request=%s continues elsewhere: %s", state.request.id, error)
                state.life.troubles.append(str(error)[:_MAX_TROUBLE])
            pair = None
            choices = self._unfinished(choices)
            state.lost(choices)
            if len(choices) > 1 and state.num_tokens(choices):
                async with asyncio.TaskGroup() as group:
                    for choice in choices:
                        group.create_task(self._serve((choice,)))
                return
            if not choices:
                return
            await asyncio.sleep(_BACKOFF_S * _BACKOFF_GROWTH**fruitless)

    def _culprits(self) -> set[Culprit]:
        """Return the replicas and links that have failed the request lately."""
        return {culprit for culprit, at in self._failed.items() if self._now() < at + _BLAME_S}

    async def _attempt(self, choices: tuple[int, ...], pair: Pair | None) -> None:
        """Make one attempt. If it fails, record what did not answer."""
        state = self._state
        state.route.attempts += 1
        if state.num_tokens(choices):
            state.route.migrations += 1
        try:
            state.check_deadline()
            if pair is None:
                began_at = monotonic()
                pair = await self._reservations.next_pair(
                    state.continuation(choices),
                    avoid=self._culprits(),
                    num_waiting=self._admission.num_waiting,
                    served_by=self._revision,
                )
                state.life.add(RequestPhase.QUEUE, "", began_at)
            self._revision = pair.revision
            if choices := self._unfinished(choices):  # some may have been stopped during the wait
                await self._try(choices, pair)
        finally:
            if pair:
                self._reservations.release(pair)

    async def _try(self, choices: tuple[int, ...], pair: Pair) -> None:
        stream = self._reservations.replicas.new_streams(len(choices))
        request = self._state.continuation(choices, stream=stream)
        attempt = self._begin(self._state, request, pair, self._culprits())
        self._attempts |= dict.fromkeys(choices, attempt)
        self._running.add(attempt.streams)  # makes it eligible for moves and copies
        counts = self._counts_of(pair.revision)
        counts.attempts += 1
        try:
            await attempt.run()
        except ClusterError as error:
            self._failed |= dict.fromkeys(attempt.culprits, self._now())
            counts.failed += not isinstance(error, _NO_FAULT)
            raise
        finally:
            self._running.discard(attempt.streams)

    def _unfinished(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(choice for choice in choices if choice in self._state.unfinished)


def _first(errors: BaseExceptionGroup[ClusterError]) -> ClusterError:
    """Return the first error of nested exception groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ClusterError)
    return error
