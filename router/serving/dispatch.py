"""Choosing replicas for requests, now or when there is room: what is known of the replicas meets the pure policy."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace

from cluster.index.prefix_index import Depths
from cluster.words.errors import CapacityError, ClusterError, ContextLengthExceeded
from cluster.words.handoff import Holder
from cluster.words.hashing import block_hashes, root_hash
from cluster.words.metrics import Metrics
from cluster.words.request import Role, SequenceRequest
from router.generation import Generation
from router.routing.admission import Ticket
from router.routing.decisions import Decisions
from router.routing.policy import CandidateReplica, Option, Policy, RoutingRequest
from router.routing.room import AnswerLength, prefill_has_room
from router.serving.attempt import may_retry
from router.serving.backup import Backup
from router.serving.gate import AdmissionGate
from router.serving.move import Place
from router.serving.pair import Pair, Promise
from router.serving.places import Places
from router.serving.rebalance import Rebalancer
from router.serving.relay import Relay
from router.serving.replica_view import Usual, has_room, view_of
from router.serving.replicas import Replica, Replicas

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Need:
    """A request as it is weighed again and again while it waits."""

    request: SequenceRequest
    hashes: list[bytes]
    num_blocks: int  # with the answer that is predicted


_NOTHING = Depths(0, 0, 0)


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
        max_waiting: int,
        metrics: Metrics,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. queue_s: how long a request may wait for a replica with room."""
        self.decisions = Decisions()
        self._policy = policy
        self.router = router
        self._replicas = replicas
        self._model = model
        self._max_local_tokens = max_local_tokens
        self._queue_s = queue_s
        self._metrics = metrics
        self._answers = AnswerLength()
        self._gate: AdmissionGate[Pair] = AdmissionGate(max_waiting=max_waiting, queue_s=queue_s)
        self._streams = itertools.count(1)
        self._running: set[Places] = set()
        replicas.on_change = self._gate.wake
        metrics.requests_waiting.set_function(lambda: len(self._gate))

    def start(self, request: SequenceRequest) -> Generation:
        return Relay(self, request)

    def new_streams(self, count: int) -> int:
        """The first of `count` stream keys that nobody else of this router has."""
        first = next(self._streams)
        for _ in range(count - 1):
            next(self._streams)
        return first

    async def admit(self, request: SequenceRequest) -> Pair:
        """The cheapest pair with room, at the request's turn. What is promised to it, `give_back` takes back.

        Raises CapacityError, at once where its turn is predicted to come too late, and ContextLengthExceeded when no
        replica could ever hold the request.
        """
        need = self._need(request)
        self._check_length(request)
        ticket = Ticket(request.tenant, request.priority, cost=self._cost(request))
        return await self._gate.enter(
            ticket, lambda: self._choose(need), within_s=request.deadline_s, give_back=self.give_back
        )

    async def choose(self, request: SequenceRequest, *, avoid: Set[str]) -> Pair:
        """The cheapest pair for a request that was admitted before, room or no room. Waits while there is none at all.

        Replicas in `avoid` are the last resort. Raises as `admit`.
        """
        need = self._need(request)
        give_up_at = time.monotonic() + self._queue_s
        while True:
            self._check_length(request)
            # A prompt may wait behind others where the beginning of it is.
            for room_on in (frozenset([Role.DECODE]), frozenset[Role]()):
                if pair := self._choose(need, avoid=avoid, room_on=room_on):
                    return pair
            try:
                await self._replicas.changed(timeout_s=give_up_at - time.monotonic())
            except TimeoutError:
                raise CapacityError("no decode replica is available", retry_after_s=1.0) from None

    def give_back(self, pair: Pair) -> None:
        """A pair is not used any more."""
        pair.answered()
        if pair.promise:
            pair.promise.end()
        self._gate.wake()

    def expect(self, pair: Pair) -> Callable[[], None]:
        """A pair is about to compute its prompt: let its siblings know. Call what is returned when it is over."""
        replica = pair.prefill or pair.decode
        assert replica
        self._replicas.index.expect(replica.id, pair.hashes)
        return lambda: self._replicas.index.settle(replica.id, pair.hashes)

    @contextmanager
    def running(self, places: Places) -> Iterator[None]:
        """Meanwhile the request may be asked to move to a replica that has less to do, and is copied."""
        self._running.add(places)
        try:
            yield
        finally:
            self._running.discard(places)

    async def rebalance_forever(self) -> None:
        """Keep the decode replicas about evenly filled with what runs."""
        await Rebalancer(self._replicas, running=self._running, new_stream=lambda: self.new_streams(1)).run_forever()

    async def back_up_forever(self, *, every: int) -> None:
        """Keep copies of what runs, no more than so many tokens behind, where prefill replicas are idle."""
        await Backup(self._replicas, running=self._running, every=every).run_forever()

    def next_prefill(self, request: SequenceRequest, decode: Replica | None, *, avoid: Set[str]) -> Pair | None:
        """Another prefill replica for a request whose decode replica is chosen already: the prefill half of a pair."""
        need = self._need(request)
        prefills = [replica for replica in self._replicas.usable(Role.PREFILL) if replica.id not in avoid]
        found, views = self._weigh(need, prefills, [decode] if decode else [], avoid=avoid)
        option = next((option for option in found if option.prefill), None)
        return self._prefill_half(need, option, views) if option else None

    def next_place(self, request: SequenceRequest) -> Place | None:
        """Another decode replica for a request that runs on one that drains, and a stream key for a choice."""
        found, _ = self._weigh(self._need(request), [], self._replicas.usable(Role.DECODE), avoid=set())
        replica = self._replicas.get(found[0].decode) if found else None
        return Place(replica, self.new_streams(1)) if replica else None

    def may_try_again(self, error: ClusterError, avoid: Set[str]) -> bool:
        """Whether another try may help. Where every decode replica is full, the client hears so at once."""
        if isinstance(error, CapacityError):
            return any(replica.id not in avoid for replica in self._replicas.usable(Role.DECODE))
        return may_retry(error)

    def admitted(self, waited_s: float) -> None:
        self._metrics.queue_time.observe(waited_s)

    def finished(self, num_tokens: Iterable[int]) -> None:
        """Answers have come to their end, with so many tokens."""
        for number in num_tokens:
            self._answers.add(number)

    def _choose(
        self, need: _Need, *, avoid: Set[str] = frozenset(), room_on: Set[Role] = frozenset(Role)
    ) -> Pair | None:
        """The cheapest pair, and what it promises to the request; None where there is none."""
        prefills, decodes = self._replicas.usable(Role.PREFILL), self._replicas.usable(Role.DECODE)
        if Role.DECODE in room_on:
            num_streams = len(need.request.choices)
            decodes = [r for r in decodes if has_room(r, num_blocks=need.num_blocks, num_streams=num_streams)]
        if Role.PREFILL in room_on:
            prefills = [r for r in prefills if self._has_room(r.id)] or prefills  # a policy may offer a few only
        found, views = self._weigh(need, prefills, decodes, avoid=avoid)
        if Role.PREFILL in room_on:
            found = [option for option in found if option.prefill is None or self._has_room(option.prefill)]
        if not found:
            return None
        self.decisions.add(need.request.id, found, views)
        return self._pair(need, found[0], views)

    def _weigh(
        self, need: _Need, prefills: list[Replica], decodes: list[Replica], *, avoid: Set[str]
    ) -> tuple[Sequence[Option], list[CandidateReplica]]:
        """The options, and what they were weighed by."""
        request = need.request
        decodes = [replica for replica in decodes if len(request.token_ids) < replica.member.max_tokens]
        if not decodes:
            return [], []
        member = decodes[0].member
        depths = self._replicas.index.depths(need.hashes)
        demand = RoutingRequest(
            num_tokens=len(request.token_ids),
            block_size=member.block_size,
            bytes_per_token=member.bytes_per_token,
            max_local_tokens=self._max_local_tokens,
        )
        usual = Usual.of([*prefills, *decodes])
        views, decode_views = (
            [view_of(replica, depths.get(replica.id, _NOTHING), usual) for replica in _preferred(replicas, avoid)]
            for replicas in (prefills, decodes)
        )
        return self._policy.options(demand, views, decode_views), [*views, *decode_views]

    def _pair(self, need: _Need, option: Option, views: Sequence[CandidateReplica]) -> Pair:
        request = need.request
        logger.debug("route request=%s %s", request.id, option)
        pair = self._prefill_half(need, option, views)
        if pair.prefill and request.sampling.max_tokens - request.num_generated == 1:
            return pair
        decode = self._replicas.get(option.decode)
        assert decode
        promise = Promise(decode, num_blocks=need.num_blocks, num_streams=len(request.choices))
        return replace(pair, decode=decode, promise=promise)

    def _prefill_half(self, need: _Need, option: Option, views: Sequence[CandidateReplica]) -> Pair:
        """Who computes the prompt, and from whom it fetches; what it must compute is in its queue from now on."""
        prefill = self._replicas.get(option.prefill) if option.prefill else None
        held = max((view.cached_tokens for view in views if view.replica == option.prefill), default=0)
        uncached = len(need.request.token_ids) - max(held, option.pull_tokens)
        answered = prefill.expect_answer(max(1, uncached)) if prefill else lambda: None
        return Pair(prefill, None, need.hashes, answered=answered, holder=self._holder(option))

    def _holder(self, option: Option) -> Holder | None:
        """The peer that gives its blocks, where the option counts on one."""
        peer = self._replicas.get(option.pull_from) if option.pull_from else None
        if peer is None or peer.id == (option.prefill or option.decode):
            return None
        return Holder(replica=peer.id, address=peer.member.address, num_tokens=option.pull_tokens)

    def _need(self, request: SequenceRequest) -> _Need:
        members = [replica.member for replica in self._replicas.usable(Role.DECODE)]
        if not members:
            return _Need(request, [], 0)
        block_size = members[0].block_size
        predicted = self._predicted_tokens(request)
        prompt_blocks = len(request.token_ids) // block_size
        # Choices share the full blocks of the prompt.
        per_choice = -(-(len(request.token_ids) + predicted) // block_size) - prompt_blocks
        root = root_hash(self._model, adapter=request.adapter, salt=request.salt)
        hashes = block_hashes(root, request.token_ids, block_size=block_size)
        return _Need(request, hashes, prompt_blocks + per_choice * len(request.choices))

    def _predicted_tokens(self, request: SequenceRequest) -> int:
        return self._answers.predict(max(1, request.sampling.max_tokens - request.num_generated))

    def _cost(self, request: SequenceRequest) -> float:
        return float(len(request.token_ids) + self._predicted_tokens(request) * len(request.choices))

    def _has_room(self, prefill: str) -> bool:
        replica = self._replicas.get(prefill)
        assert replica
        queued = max(replica.status.queued_tokens, replica.pending_tokens)
        return prefill_has_room(queued_tokens=queued, tokens_per_s=replica.status.prefill_tokens_per_s)

    def _check_length(self, request: SequenceRequest) -> None:
        """Raises ContextLengthExceeded where replicas are there, and none could ever hold the request."""
        limit = max((replica.member.max_tokens for replica in self._replicas.usable(Role.DECODE)), default=None)
        if limit is not None and len(request.token_ids) >= limit:
            raise ContextLengthExceeded(
                f"{len(request.token_ids)} tokens leave no room in the {limit} that a replica holds", param="prompt"
            )


def _preferred(replicas: list[Replica], avoid: Iterable[str]) -> list[Replica]:
    """Those that have not failed this request yet; all, if all have."""
    return [replica for replica in replicas if replica.id not in avoid] or replicas
