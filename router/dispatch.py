"""Carrying out a choice: one pair after another until the request is served, without a client seeing more than a pause.

A request that fails on its way goes on elsewhere from prompt + tokens so far. Sampling depends on (seed, position)
only, so the continuation is the one that would have come anyway, and no token is sent twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.errors import CapacityError, ClusterError, ContextLengthExceeded
from cluster.hashing import block_hashes, root_hash
from cluster.metrics import Metrics
from cluster.request import Role, SampledToken, SequenceRequest
from cluster.timing import StepTiming
from router.attempt import Attempt, Pair, may_retry
from router.decisions import Decisions
from router.generation import ChoiceToken, Generation, Route
from router.move import Place
from router.policy import Demand, Option, Policy, ReplicaView
from router.replicas import Replica, Replicas

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 8  # per choice; the request's own deadline usually comes first
_BACKOFF_S, _MAX_BACKOFF_S = 0.01, 1.0

_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9
_ANY_LENGTH = 1 << 30  # the measured rates know nothing of chunks


class Dispatch:
    """Chooses replicas and serves requests on them. One per router; lives on the event loop."""

    def __init__(
        self,
        replicas: Replicas,
        *,
        router: str,
        model: str,
        policy: Policy,
        max_local_tokens: int,
        queue_s: float,
        metrics: Metrics,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. queue_s: how long a request may wait for any replica."""
        self.decisions = Decisions()
        self._policy = policy
        self.router = router
        self._replicas = replicas
        self._model = model
        self._max_local_tokens = max_local_tokens
        self._queue_s = queue_s
        self._metrics = metrics
        self._streams = itertools.count(1)

    def start(self, request: SequenceRequest) -> Generation:
        return _Generation(self, request)

    def new_streams(self, count: int) -> int:
        """The first of `count` stream keys that nobody else of this router has."""
        first = next(self._streams)
        for _ in range(count - 1):
            next(self._streams)
        return first

    async def choose(self, request: SequenceRequest, *, avoid: set[str]) -> Pair:
        """The cheapest pair; waits for one while there is none. Replicas in `avoid` are the last resort.

        Raises CapacityError when none comes in time, ContextLengthExceeded when none could ever hold the request.
        """
        give_up_at = time.monotonic() + self._queue_s
        while True:
            decodes = self._replicas.usable(Role.DECODE)
            if found := self._options(request, self._replicas.usable(Role.PREFILL), decodes, avoid=avoid):
                self.decisions.add(request.id, found)
                return self._pair(request, found[0])
            if decodes:
                limit = max(replica.member.max_tokens for replica in decodes)
                raise ContextLengthExceeded(
                    f"{len(request.token_ids)} tokens leave no room in the {limit} that a replica holds", param="prompt"
                )
            try:
                await self._replicas.changed(timeout_s=give_up_at - time.monotonic())
            except TimeoutError:
                raise CapacityError("no decode replica is available", retry_after_s=self._queue_s) from None

    def expect(self, request: SequenceRequest, replica: Replica | None) -> Callable[[], None]:
        """`replica` is about to compute this prompt: let its siblings know. Call what is returned when it is over."""
        if replica is None:
            return lambda: None
        id, hashes = replica.id, self._hashes(request, replica.member.block_size)
        self._replicas.index.expect(id, hashes)
        return lambda: self._replicas.index.settle(id, hashes)

    def next_prefill(self, request: SequenceRequest, decode: Replica | None, *, avoid: set[str]) -> Replica | None:
        """Another prefill replica for a request whose decode replica is chosen already."""
        prefills = [replica for replica in self._replicas.usable(Role.PREFILL) if replica.id not in avoid]
        found = self._options(request, prefills, [decode] if decode else [], avoid=avoid)
        best = next((option.prefill for option in found if option.prefill), None)
        return self._replicas.get(best) if best else None

    def next_place(self, request: SequenceRequest) -> Place | None:
        """Another decode replica for a request that runs on one that drains, and a stream key for a choice."""
        found = self._options(request, [], self._replicas.usable(Role.DECODE), avoid=set())
        replica = self._replicas.get(found[0].decode) if found else None
        return Place(replica, self.new_streams(1)) if replica else None

    def may_try_again(self, error: ClusterError, avoid: set[str]) -> bool:
        """Whether another try may help. Where every decode replica is full, the client hears so at once."""
        if isinstance(error, CapacityError):
            return any(replica.id not in avoid for replica in self._replicas.usable(Role.DECODE))
        return may_retry(error)

    def admitted(self, waited_s: float) -> None:
        self._metrics.queue_time.observe(waited_s)

    def _options(
        self, request: SequenceRequest, prefills: list[Replica], decodes: list[Replica], *, avoid: set[str]
    ) -> Sequence[Option]:
        decodes = [replica for replica in decodes if len(request.token_ids) < replica.member.max_tokens]
        if not decodes:
            return []
        member = decodes[0].member
        depths = self._replicas.index.match(self._hashes(request, member.block_size))
        demand = Demand(
            num_tokens=len(request.token_ids),
            block_size=member.block_size,
            bytes_per_token=member.bytes_per_token,
            max_local_tokens=self._max_local_tokens,
        )
        usual = _Usual.of([*prefills, *decodes])
        return self._policy.options(
            demand,
            [_view(replica, depths, usual) for replica in _preferred(prefills, avoid)],
            [_view(replica, depths, usual) for replica in _preferred(decodes, avoid)],
        )

    def _hashes(self, request: SequenceRequest, block_size: int) -> list[bytes]:
        root = root_hash(self._model, adapter=request.adapter, salt=request.salt)
        return block_hashes(root, request.token_ids, block_size=block_size)

    def _pair(self, request: SequenceRequest, option: Option) -> Pair:
        wants_one_token = request.sampling.max_tokens - request.num_generated == 1
        decode = None if option.prefill and wants_one_token else self._replicas.get(option.decode)
        logger.debug("route request=%s %s", request.id, option)
        return Pair(self._replicas.get(option.prefill) if option.prefill else None, decode)


class _Generation:
    """One request under way: a task that serves it, and the tokens that it has brought."""

    def __init__(self, dispatch: Dispatch, request: SequenceRequest) -> None:
        self.route = Route()
        self._dispatch = dispatch
        self._request = request
        self._started_at = time.monotonic()
        self._tokens: dict[int, list[int]] = {choice: [] for choice in request.choices}
        self._unfinished = set(request.choices)
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

    async def _run(self) -> None:
        try:
            await self._serve(self._request.choices, avoid=set())
        except* ClusterError as errors:
            self._outbox.put_nowait(_first(errors))
        finally:
            self._outbox.put_nowait(None)

    async def _serve(self, choices: tuple[int, ...], *, avoid: set[str]) -> None:
        """Bring these choices to their end; after a failure, those that have tokens go on one by one."""
        for attempt in itertools.count(1):
            try:
                return await self._attempt(choices, avoid=avoid)
            except ClusterError as error:
                if attempt == _MAX_ATTEMPTS or not self._dispatch.may_try_again(error, avoid):
                    raise
                logger.warning("request=%s goes on elsewhere: %s", self._request.id, error)
            choices = tuple(choice for choice in choices if choice in self._unfinished)
            if len(choices) > 1 and any(self._tokens[choice] for choice in choices):
                async with asyncio.TaskGroup() as group:
                    for choice in choices:
                        group.create_task(self._serve((choice,), avoid=set(avoid)))
                return
            if not choices:
                return
            await asyncio.sleep(min(_MAX_BACKOFF_S, _BACKOFF_S * 2**attempt))

    async def _attempt(self, choices: tuple[int, ...], *, avoid: set[str]) -> None:
        """One try. Adds to `avoid` the replicas that it used, if it fails."""
        self.route.attempts += 1
        request = replace(
            self._request,
            token_ids=self._request.token_ids + tuple(self._tokens[choices[0]]),
            choices=choices,
            stream=self._dispatch.new_streams(len(choices)),
        )
        pair = await self._dispatch.choose(request, avoid=avoid)
        settle = self._dispatch.expect(request, pair.prefill or pair.decode)
        self._dispatch.admitted(time.monotonic() - self._started_at)
        used = {replica.id for replica in (pair.prefill, pair.decode) if replica}

        def next_prefill() -> Replica | None:
            replica = self._dispatch.next_prefill(request, pair.decode, avoid=avoid | used)
            used.update([replica.id] if replica else [])
            return replica

        attempt = Attempt(
            request,
            pair,
            router=self._dispatch.router,
            route=self.route,
            emit=self._emit,
            next_prefill=next_prefill,
            next_place=lambda: self._dispatch.next_place(request),
        )
        self._attempts |= dict.fromkeys(choices, attempt)
        try:
            await attempt.run()
        except ClusterError:
            avoid |= used
            raise
        finally:
            settle()

    def _emit(self, choice: int, token: SampledToken) -> None:
        self._tokens[choice].append(token.token_id)
        if token.finish_reason:
            self._unfinished.discard(choice)
        self._outbox.put_nowait(ChoiceToken(choice, token))


@dataclass(frozen=True)
class _Usual:
    """What to assume of a replica that has not measured something yet: what the others have, or a default."""

    prefill_tokens_per_s: float
    step_s: float
    link_bytes_per_s: float

    @classmethod
    def of(cls, replicas: Sequence[Replica]) -> _Usual:
        statuses = [replica.status for replica in replicas]
        return cls(
            _mean([status.prefill_tokens_per_s for status in statuses], _DEFAULT_PREFILL_TOKENS_PER_S),
            _mean([status.decode_step_s for status in statuses], _DEFAULT_STEP_S),
            _mean([status.link_bytes_per_s for status in statuses], _DEFAULT_LINK_BYTES_PER_S),
        )


def _view(replica: Replica, depths: dict[str, int], usual: _Usual) -> ReplicaView:
    status, member = replica.status, replica.member
    cached_tokens = depths.get(replica.id, 0) * member.block_size
    token_s = 1 / (status.prefill_tokens_per_s or usual.prefill_tokens_per_s)
    # What we have sent and it has not reported yet counts too.
    queued_tokens = max(status.queued_tokens, replica.pending_tokens)
    return ReplicaView(
        replica=replica.id,
        cached_tokens=cached_tokens,
        stored_tokens=cached_tokens,
        queue_s=queued_tokens * token_s,
        num_streams=max(status.running + status.waiting, replica.num_requests),
        num_blocks=member.num_blocks,
        available_blocks=status.blocks_free + status.blocks_cached,
        # A prefill step is taken to have a decode step's constant part, until workers report their own.
        timing=StepTiming(base_s=status.decode_step_s or usual.step_s, token_s=token_s),
        max_batch_tokens=_ANY_LENGTH,
        link_bytes_per_s=status.link_bytes_per_s or usual.link_bytes_per_s,
    )


def _mean(values: Sequence[float], default: float) -> float:
    """Of what was measured."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default


def _preferred(replicas: list[Replica], avoid: Iterable[str]) -> list[Replica]:
    """Those that have not failed this request yet; all, if all have."""
    return [replica for replica in replicas if replica.id not in avoid] or replicas


def _first(errors: BaseExceptionGroup[ClusterError]) -> ClusterError:
    """The first error of a group of groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, ClusterError)
    return error
