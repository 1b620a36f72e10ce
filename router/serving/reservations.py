"""Choice and reservation of replicas. A reservation counts a request's load before the replica's reports show it.

`router.routing.chooser`, which is pure, decides. This module gathers its inputs and reserves what it chose.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial

from core.index.prefix_index import Depths, PrefixIndex
from core.types.errors import (
    CapacityError,
    ClusterError,
    ContextLengthExceeded,
    DeadlineExceeded,
    LayoutMismatch,
    ModelUnavailable,
    ReplicaLost,
    RequestError,
    TransferError,
)
from core.types.handoff import PrefixSource
from core.types.prefix_hash import block_hashes, checkpoint_hash, expected_hashes, root_hash
from core.types.request import OFFLINE, Role, SequenceRequest
from core.types.revisions import Revision
from router.routing.admission_queue import most_choices
from router.routing.candidates import ReplicaLoad
from router.routing.chooser import (
    NO_CULPRITS,
    AnswerLength,
    Chooser,
    Culprit,
    Decision,
    Need,
    with_room,
    with_room_for_local_decode,
)
from router.routing.decisions import Decisions
from router.routing.fair_queue import NO_PLACES, Places
from router.routing.revisions import Revisions
from router.serving.replicas import DecodeStream, Replica, Replicas
from router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_ANY_LENGTH = 1 << 31  # tokens
_REPORTED_S = 1.0  # delay within which the replica itself publishes a computed prompt's blocks


class Reservation:
    """Load counted at `replica` from construction until `end`, which is idempotent."""

    def __init__(
        self,
        replica: Replica,
        *,
        prompt_tokens: int = 0,
        num_requests: int = 0,
        num_blocks: int = 0,
        num_streams: int = 0,
    ) -> None:
        """prompt_tokens: tokens to compute. num_requests: running calls. num_blocks: includes the predicted answer."""
        self.num_blocks = num_blocks
        self._amounts = (prompt_tokens, num_requests, num_blocks, num_streams)
        self._replica: Replica | None = replica
        replica.reserve(*self._amounts)

    def end(self) -> None:
        if self._replica:
            self._replica.reserve(*(-amount for amount in self._amounts))
        self._replica = None


class PromptReservation:
    """Prompt to be computed by `replica`: tokens in its queue, and blocks that the index expects there."""

    def __init__(self, replica: Replica, index: PrefixIndex, hashes: Sequence[bytes], *, num_tokens: int) -> None:
        """hashes: of the prompt's full blocks and checkpoints. num_tokens: tokens to compute."""
        self._settle = partial(index.settle, replica.id, hashes)
        self._queued = Reservation(replica, prompt_tokens=num_tokens)
        self._is_over = False
        index.expect(replica.id, hashes)

    def end(self, *, is_computed: bool = False) -> None:
        """End the reservation when the prompt is computed or abandoned. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._queued.end()
        if is_computed:
            asyncio.get_running_loop().call_later(_REPORTED_S, self._settle)
        else:
            self._settle()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Replicas for one attempt. Without a prefill replica the decode replica computes the prompt; without a decode
    replica the request ends with the first token of each choice."""

    prefill: Replica | None
    decode: Replica | None
    prompt: PromptReservation  # at the replica that computes the prompt, until it is computed
    answer: Reservation | None  # blocks and streams of the decode replica, until the pair is released
    prefix_source: PrefixSource | None  # peer from which the prompt's replica may fetch missing prefix blocks
    revision: int | None = None  # revision of both replicas; None while there is only one

    def end(self) -> None:
        """End both reservations."""
        self.prompt.end()
        if self.answer:
            self.answer.end()


@dataclass(frozen=True)
class Demand:
    """Request with its derived room and block hashes, computed once for all routing decisions while it waits."""

    request: SequenceRequest
    need: Need
    hashes: list[bytes]

    @cached_property
    def checkpoints(self) -> list[bytes]:
        """Hash of the checkpoint at the end of each block."""
        return [checkpoint_hash(prefix_hash) for prefix_hash in self.hashes]

    @property
    def is_offline(self) -> bool:
        return self.request.priority >= OFFLINE


class Reservations:
    """Choice and bookkeeping of replicas for the requests of one router. Lives on the event loop."""

    def __init__(
        self,
        replicas: Replicas,
        chooser: Chooser,
        *,
        model: str,
        block_size: int,
        queue_s: float,
        metrics: Metrics,
        revisions: Revisions,
        decisions: Decisions,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. queue_s: maximum wait of an admitted request while no replica
        can answer."""
        self.replicas = replicas
        self.on_change: Callable[[], None] = lambda: None  # called when room may have come free
        self._chooser = chooser
        self._model = model
        self._block_size = block_size
        self._queue_s = queue_s
        self._metrics = metrics
        self._revisions = revisions
        self._decisions = decisions
        self._answers = AnswerLength()
        replicas.on_change = lambda: self.on_change()

    def with_room(self, demand: Demand, *, num_waiting: int, may_displace: bool) -> Pair | None:
        """Reserve the cheapest pair with room for a new request; None if there is none.

        num_waiting: number of queued requests. may_displace: accept a decode replica without free blocks.
        """
        self.replicas.availability.check()
        self.check_fit(demand.request, share=1.0)  # the first replica may have joined after admission began
        decodes = self._loads(Role.DECODE, demand)
        some: Sequence[ReplicaLoad] = with_room(decodes, demand.need)
        if not some and may_displace:
            some = [load for load in decodes if demand.need.num_streams <= load.free_streams]
        usable = [load.replica for load in decodes] or [replica.id for replica in self.replicas.answerers()]
        for revision in self._revisions.for_new_request(demand.request, usable=usable):
            if pair := self._choose(demand, some, revision, prefill_needs_room=True):
                return pair
            if pair := self._choose_local_decode(
                demand, decodes, revision, num_waiting=num_waiting, prefill_needs_room=True
            ):
                return pair
        return None

    async def next_pair(
        self, request: SequenceRequest, *, avoid: Set[Culprit], num_waiting: int, served_by: int | None = None
    ) -> Pair:
        """Reserve the cheapest pair for a request that was admitted before, with or without room.

        Waits while no replica that can hold the request can answer. Culprits in `avoid` are the last resort. served_by:
        the revision of an earlier pair. Raises ModelUnavailable and DeadlineExceeded.
        """
        demand = self.demand(request)
        wait_s = self._queue_s if request.deadline_s is None else min(self._queue_s, request.deadline_s)
        now = asyncio.get_running_loop().time
        give_up_at = now() + wait_s
        while True:
            self.replicas.availability.check()
            for avoided in dict.fromkeys((frozenset(avoid), NO_CULPRITS)):
                decodes = self._loads(Role.DECODE, demand, avoided)
                # Prefill replicas without room qualify here: the prompt may queue where its prefix is cached.
                for revision in self._revisions.for_continuation(
                    served_by, untried={load.replica for load in decodes} - avoid
                ):
                    if pair := (
                        self._choose(demand, with_room(decodes, demand.need), revision, avoid=avoided)
                        or self._choose_local_decode(demand, decodes, revision, avoid=avoided, num_waiting=num_waiting)
                        or self._choose(demand, decodes, revision, avoid=avoided)
                    ):
                        return pair
            try:
                await self.replicas.changed(timeout_s=give_up_at - now())
            except TimeoutError:
                if wait_s == request.deadline_s:
                    raise DeadlineExceeded(
                        f"request {request.id}: no decode replica became available within {wait_s:g} s"
                    ) from None
                raise self.replicas.availability.error(num_tokens=demand.need.num_tokens) from None

    def another_prefill(self, request: SequenceRequest, pair: Pair, *, avoid: Set[Culprit]) -> Pair | None:
        """Return the pair with another prefill replica, for a request whose decode replica already waits for its KV."""
        if pair.decode is None:
            return None
        demand, decode = self.demand(request), pair.decode
        prefills = [
            load
            for load in self._loads(Role.PREFILL, demand, avoid)
            if self._revisions.in_one_revision(load.replica, decode.id)
        ]
        decision = self._chooser.choose_prefill(demand.need, prefills, decode.load(), self._depths(demand), avoid=avoid)
        return self._pair(demand, decision, decode, pair.answer, pair.revision) if decision else None

    def another_decode(self, request: SequenceRequest, source: str) -> DecodeStream | None:
        """Return a stream on another decode replica, preferably one with room, for a choice on draining `source`."""
        demand = self.demand(request)
        depths = self._depths(demand)
        decodes = [load for load in self._loads(Role.DECODE, demand) if self._revisions.may_move(source, load.replica)]
        for some in (with_room(decodes, demand.need), decodes):
            decision = self._chooser.choose(demand.need, [], some, depths)
            if decision and (replica := self._replica(decision.decode)):
                return DecodeStream(replica, self.replicas.new_streams(1))
        return None

    def release(self, pair: Pair) -> None:
        """End the reservations of a pair."""
        pair.end()
        self.on_change()

    def may_try_again(self, error: ClusterError, avoid: Set[Culprit]) -> bool:
        """Return whether another attempt may help. If every replica that can answer has rejected the request for lack
        of room, the client gets the error at once."""
        if isinstance(error, CapacityError | ContextLengthExceeded):
            return may_retry(error) and any(replica.id not in avoid for replica in self.replicas.answerers())
        return may_retry(error)

    def finished(self, num_tokens: Iterable[int]) -> None:
        """Update the length prediction with the lengths of finished answers."""
        for number in num_tokens:
            self._answers.add(number)

    def demand(self, request: SequenceRequest) -> Demand:
        root = root_hash(self._model, adapter=request.adapter, salt=request.salt)
        hashes = block_hashes(root, request.token_ids, block_size=self._block_size)
        return Demand(request, self._need(request), hashes)

    def cost(self, request: SequenceRequest) -> float:
        """Predict the work of a request, in tokens."""
        return float(len(request.token_ids) + self._predicted_tokens(request) * len(request.choices))

    def num_blocks(self, request: SequenceRequest) -> int:
        """Predict the blocks that a request needs on a decode replica."""
        return self._need(request).num_blocks

    def free_places(self) -> Places:
        """Sum the free places of decode replicas, and of prefill replicas that would decode now."""
        free = NO_PLACES
        decodes = self.replicas.usable(Role.DECODE)
        for replica in decodes:
            load = replica.load()
            free = free.plus(Places(load.free_streams, load.free_blocks))
        for replica in self.replicas.usable(Role.PREFILL):
            if decodes and not replica.member.answers_overflow:
                continue
            load = replica.load()
            free = free.plus(Places(load.free_local_decodes, load.free_local_decode_blocks))
        return free

    def num_decode_blocks(self) -> int:
        return sum(replica.member.num_blocks for replica in self.replicas.usable(Role.DECODE))

    def may_hold(self, num_tokens: int) -> bool:
        """Return whether a usable replica decodes sequences longer than num_tokens."""
        return any(num_tokens < replica.member.max_decoded_tokens for replica in self.replicas.answerers())

    def check_fit(self, request: SequenceRequest, *, share: float) -> None:
        """Raise RequestError if there are decode replicas, but no known replica can ever hold the request.

        share: part of the decode replicas that one tenant may use.
        """
        members = [replica.member for replica in self.replicas.usable(Role.DECODE)]
        if not members:
            return
        # A replica that is lost or drains counts until it has left: it, or its successor, may return.
        limit = max(replica.member.max_decoded_tokens for replica in self.replicas)
        if request.sampling.max_tokens == 1:  # needs no decode replica
            limit = max(limit, *(replica.member.max_tokens + 1 for replica in self.replicas))
        if len(request.token_ids) >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.token_ids)} tokens; a replica holds {limit}, answer included",
                param="prompt",
            )
        places = [member.max_running for member in members]
        if len(request.choices) > (most := min(max(places), most_choices(sum(places), share=share))):
            owner = "" if most == max(places) else " of one tenant"
            raise RequestError(
                f"n: a replica runs at most {most} choices{owner} at once, not {len(request.choices)}", param="n"
            )

    def _choose(
        self,
        demand: Demand,
        decodes: Sequence[ReplicaLoad],
        revision: Revision | None,
        *,
        avoid: Set[Culprit] = NO_CULPRITS,
        prefill_needs_room: bool = False,
    ) -> Pair | None:
        """Reserve the cheapest pair of `revision` (None: all replicas are of one revision)."""
        decodes = _of_revision(revision, decodes)
        prefills = _of_revision(revision, self._loads(Role.PREFILL, demand, avoid))
        depths = self._depths(demand)
        decision = self._chooser.choose(
            demand.need, prefills, decodes, depths, avoid=avoid, prefill_needs_room=prefill_needs_room
        )
        return self._reserve(demand, decision, revision) if decision else None

    def _choose_local_decode(
        self,
        demand: Demand,
        decodes: Sequence[ReplicaLoad],
        revision: Revision | None,
        *,
        num_waiting: int,
        avoid: Set[Culprit] = NO_CULPRITS,
        prefill_needs_room: bool = False,
    ) -> Pair | None:
        """Reserve a prefill replica that answers alone, if there is no decode replica, or if none has room and waiting
        for one costs more.

        An offline request decodes locally only if there is no decode replica.
        """
        decodes = _of_revision(revision, decodes)
        if (decodes and demand.is_offline) or with_room(decodes, demand.need):
            return None
        prefills = _of_revision(revision, self._loads(Role.PREFILL, demand, avoid))
        hosts = [
            load
            for load in with_room_for_local_decode(prefills, demand.need)
            if (load.has_room_to_prefill or not prefill_needs_room) and (load.member.answers_overflow or not decodes)
        ]
        if not hosts:
            return None
        decision = self._chooser.choose_local_decode(
            demand.need,
            hosts,
            prefills,
            decodes,
            self._depths(demand),
            num_waiting=num_waiting,
            answer_tokens=self._answers.predict(_ANY_LENGTH),
        )
        if decision is None:
            return None
        self._metrics.local_decodes.inc()
        return self._reserve(demand, decision, revision)

    def _reserve(self, demand: Demand, decision: Decision, revision: Revision | None) -> Pair:
        self._decisions.add(demand.request.id, decision.options, decision.candidates)
        logger.debug("route request=%s %s", demand.request.id, decision.options[0])
        decode = self._replica(decision.decode)
        if (decision.decode and not decode) or (decision.prefill and not self._replica(decision.prefill)):
            raise ClusterError(f"the routing policy chose an unknown replica: {decision.options[0]}")
        need = demand.need
        answer = Reservation(decode, num_blocks=need.num_blocks, num_streams=need.num_streams) if decode else None
        return self._pair(demand, decision, decode, answer, revision.number if revision else None)

    def _pair(
        self,
        demand: Demand,
        decision: Decision,
        decode: Replica | None,
        answer: Reservation | None,
        revision: int | None,
    ) -> Pair:
        """Reserve the prompt at the replica that computes it, and build the pair."""
        prefill = self._replica(decision.prefill)
        computes = prefill or decode
        assert computes
        expected = expected_hashes(
            demand.hashes,
            num_tokens=demand.need.num_tokens,
            block_size=self._block_size,
            num_checkpoints=computes.member.cache.num_checkpoints,
        )
        prompt = PromptReservation(computes, self.replicas.index, expected, num_tokens=decision.prompt_tokens)
        return Pair(
            prefill=prefill,
            decode=decode,
            prompt=prompt,
            answer=answer,
            prefix_source=decision.prefix_source,
            revision=revision,
        )

    def _need(self, request: SequenceRequest) -> Need:
        num_tokens, num_streams = len(request.token_ids), len(request.choices)
        prompt_blocks = num_tokens // self._block_size
        # Choices share the full blocks of the prompt.
        per_choice = -(-(num_tokens + self._predicted_tokens(request)) // self._block_size) - prompt_blocks
        return Need(
            num_tokens=num_tokens,
            num_streams=num_streams,
            num_blocks=prompt_blocks + per_choice * num_streams,
            max_new_tokens=request.sampling.max_tokens - request.num_generated,
        )

    def _predicted_tokens(self, request: SequenceRequest) -> int:
        return self._answers.predict(max(1, request.sampling.max_tokens - request.num_generated))

    def _loads(self, role: Role, demand: Demand, avoid: Set[Culprit] = NO_CULPRITS) -> list[ReplicaLoad]:
        """Return the loads of the usable replicas outside `avoid` that are large enough for the request."""
        # A prefill replica needs room for the prompt only, a decode replica for at least one more token.
        num_tokens = demand.need.num_tokens + (role is Role.DECODE)
        return [
            replica.load()
            for replica in self.replicas.usable(role)
            if replica.id not in avoid and num_tokens <= replica.member.max_tokens
        ]

    def _depths(self, demand: Demand) -> Mapping[str, Depths]:
        """Return how much of the prompt each replica holds; empty if all of it must be computed anyway."""
        if demand.request.num_prompt_logprobs is not None:
            return {}
        index, among = self.replicas.index, self.replicas.num_checkpoints
        if not among:
            return index.depths(demand.hashes)
        return index.depths_to_checkpoints(demand.hashes, demand.checkpoints, among=among)

    def _replica(self, name: str | None) -> Replica | None:
        return self.replicas.get(name) if name else None


def may_retry(error: ClusterError) -> bool:
    """Return whether another replica may succeed after this error, for example a larger one."""
    retryable = ReplicaLost | CapacityError | ContextLengthExceeded | TransferError
    return isinstance(error, retryable) and not isinstance(error, LayoutMismatch | ModelUnavailable)


def _of_revision(revision: Revision | None, loads: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
    return [load for load in loads if load.replica in revision.replicas] if revision else loads
