"""Serving core of a router, without endpoints and text processing: token requests, relayed from attempt to attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
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
from core.types.timeline import RequestPhase
from router.generation import Arrived, Generation
from router.routing.chooser import Chooser, Culprit
from router.routing.decisions import Decisions
from router.routing.revisions import Revisions
from router.serving.admission_waits import PairAdmission
from router.serving.attempt import Attempt
from router.serving.backup import Backup
from router.serving.decode_streams import DecodeStreams
from router.serving.rebalance import Rebalancer
from router.serving.replicas import Replicas
from router.serving.request_state import RequestState
from router.serving.reservations import Pair, Reservations
from router.telemetry.metrics import Metrics
from router.telemetry.traffic import Flows

logger = logging.getLogger(__name__)

# Consecutive attempts with little progress after which a request fails. It bounds the number of replicas that a request
# can crash; progress since the last failure resets the count.
_MAX_FRUITLESS = 5
_PROGRESS = 8  # tokens
_BACKOFF_S, _BACKOFF_GROWTH = 0.02, 4  # per fruitless attempt; five waits outlast a fault of a few seconds
_BLAME_S = 10.0  # time for which the request avoids a replica or link that failed
_MAX_TROUBLE = 200  # characters kept of an attempt's error
_NO_FAULT = (RequestError, CapacityError, DeadlineExceeded, ClientTooSlow, GrammarNotFollowed, NoTokenAllowed)


class RouterCore:
    """Implementation of router.generation.TokenService. Owns the running attempts and their background loops."""

    def __init__(
        self,
        replicas: Replicas,
        chooser: Chooser,
        *,
        model: str,
        block_size: int,
        vocab_size: int,
        queue_s: float,
        max_waiting: int,
        metrics: Metrics,
        tenant_share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. queue_s: maximum wait for a replica with room. tenant_share:
        returns the share of the decode capacity that one tenant may take while others compete."""
        self.replicas = replicas
        self.revisions = Revisions()
        self.decisions = Decisions()
        self.flows = Flows()
        self.reservations = Reservations(
            replicas,
            chooser,
            model=model,
            block_size=block_size,
            queue_s=queue_s,
            metrics=metrics,
            revisions=self.revisions,
            decisions=self.decisions,
        )
        self.admission = PairAdmission(
            self.reservations, queue_s=queue_s, max_waiting=max_waiting, tenant_share=tenant_share, metrics=metrics
        )
        self.vocab_size = vocab_size
        self.running: set[DecodeStreams] = set()  # of the running attempts

    def start(self, request: SequenceRequest) -> Generation:
        relay = Relay(request, self)
        self.decisions.live(request.id, relay.life, tenant=request.tenant, drafts=relay.route.drafts)
        return relay

    @property
    def num_running(self) -> int:
        """Number of running attempts."""
        return len(self.running)

    async def rebalance_forever(self) -> None:
        """Keep the running answers spread evenly over the decode replicas."""
        await Rebalancer(self.replicas, self.revisions, running=self.running).run_forever()

    async def back_up_forever(self, *, every: int) -> None:
        """Copy running answers to idle prefill replicas, every `every` tokens."""
        await Backup(self.replicas, self.revisions, running=self.running, every=every).run_forever()


class Relay:
    """Implementation of router.generation.Generation: the task that serves a request, and its tokens.

    A request whose replicas fail continues elsewhere from its prompt and its tokens so far. Sampling depends on (seed,
    position) only, so the continuation is the same, and no token is sent twice.
    """

    def __init__(self, request: SequenceRequest, core: RouterCore) -> None:
        self._core = core
        self._state = RequestState(request)
        self.route, self.life = self._state.route, self._state.life
        self._attempts: dict[int, Attempt] = {}  # current attempt of each choice
        self._failed: dict[Culprit, float] = {}  # time of the last failure
        self._now = asyncio.get_running_loop().time
        self._revision: int | None = None  # last revision that served the request; None while there is only one
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
            async with self._core.admission.admit(state.request) as pair:
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
                self._core.reservations.finished([len(tokens) for tokens in state.tokens.values()])
                self._core.revisions.count(self._revision).add_answer(*state.spread_s())
            state.responses.end()

    async def _serve(self, choices: tuple[int, ...], pair: Pair | None = None) -> None:
        """Serve `choices` to their end. After a failure, choices with tokens continue separately.

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
                if fruitless == _MAX_FRUITLESS or not self._core.reservations.may_try_again(error, self._culprits()):
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
        """Return the replicas and links that have recently failed the request."""
        return {culprit for culprit, at in self._failed.items() if self._now() < at + _BLAME_S}

    async def _attempt(self, choices: tuple[int, ...], pair: Pair | None) -> None:
        """Make one attempt. If it fails, record the replicas and links to blame."""
        state = self._state
        state.route.attempts += 1
        if state.num_tokens(choices):
            state.route.migrations += 1
        try:
            state.check_deadline()
            if pair is None:
                began_at = monotonic()
                pair = await self._core.reservations.next_pair(
                    state.continuation(choices),
                    avoid=self._culprits(),
                    num_waiting=self._core.admission.num_waiting,
                    served_by=self._revision,
                )
                state.life.add(RequestPhase.QUEUE, "", began_at)
            self._revision = pair.revision
            if choices := self._unfinished(choices):  # some may have been stopped during the wait
                await self._try(choices, pair)
        finally:
            if pair:
                self._core.reservations.release(pair)

    async def _try(self, choices: tuple[int, ...], pair: Pair) -> None:
        core = self._core
        attempt = Attempt(
            self._state,
            self._state.continuation(choices, stream=core.replicas.new_streams(len(choices))),
            pair,
            reservations=core.reservations,
            flows=core.flows,
            vocab_size=core.vocab_size,
            avoid=self._culprits(),
        )
        self._attempts |= dict.fromkeys(choices, attempt)
        core.running.add(attempt.streams)  # makes it eligible for moves and copies
        counts = core.revisions.count(pair.revision)
        counts.attempts += 1
        try:
            await attempt.run()
        except ClusterError as error:
            self._failed |= dict.fromkeys(attempt.culprits, self._now())
            counts.failed += not isinstance(error, _NO_FAULT)
            raise
        finally:
            core.running.discard(attempt.streams)

    def _unfinished(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(choice for choice in choices if choice in self._state.unfinished)


def _first(errors: BaseExceptionGroup[ClusterError]) -> ClusterError:
    """Return the first error of nested exception groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ClusterError)
    return error
