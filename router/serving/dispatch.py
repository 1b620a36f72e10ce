"""Replicas for requests, now or when there is room: what is known of them goes to the pure chooser, and what it decides
is booked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from core.index.prefix_index import Depths
from core.types.errors import CapacityError, ClusterError, DeadlineExceeded, LayoutMismatch, ReplicaLost, TransferError
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import OFFLINE, Role, SequenceRequest
from core.types.revisions import Revision
from router.routing.chooser import AnswerLength, Chooser, Decision, Need, with_room, with_room_for_local_decode
from router.routing.decisions import Decisions
from router.routing.fair_shares import QueuedRequest
from router.routing.replica_load import ReplicaLoad
from router.routing.revisions import Revisions
from router.routing.tenant_share import NO_PLACES, Places
from router.serving.admission_queue import AdmissionGate
from router.serving.availability import Availability
from router.serving.fit import check_fit
from router.serving.flows import Flows
from router.serving.move import DecodeStream
from router.serving.pair import Booking, Pair, PromptBooking
from router.serving.prompt_parts import PromptParts
from router.serving.replica import Replica
from router.serving.replicas import Replicas
from router.serving.tenant_shares import Held, TenantShares
from router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

_ANY_LENGTH = 1 << 31  # tokens


@dataclass(frozen=True)
class _Asked:
    """A request as it is weighed again and again while it waits."""

    request: SequenceRequest
    need: Need
    hashes: list[bytes]
    only: int | None = None  # a revision


class Dispatch:
    """Chooses and books replicas. One per router; lives on the event loop."""

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
        name: str = "",
        tenant_share: Callable[[], float] = lambda: 1.0,
        revisions: Revisions | None = None,
    ) -> None:
        """model: fingerprint, as in the prefix hashes. vocab_size: of that model.
        queue_s: how long a request may wait for a replica with room. name: what clients call it. tenant_share: of what
        the others leave of the decode replicas, for one tenant; now. revisions: None: there is one alone."""
        self.replicas = replicas
        self.revisions = revisions or Revisions()
        self.decisions = Decisions()
        self.flows = Flows()
        self._chooser = chooser
        self._model = model
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._queue_s = queue_s
        self._metrics = metrics
        self._tenant_share = tenant_share
        self._answers = AnswerLength()
        self._gate: AdmissionGate[Pair] = AdmissionGate(max_waiting=max_waiting, queue_s=queue_s)
        self._shares = TenantShares(
            share=tenant_share, free=self._free_places, max_waiting=max_waiting, queue_s=queue_s
        )
        self._now = asyncio.get_running_loop().time
        self.availability = Availability(self.may_answer, name=name, now=self._now)
        replicas.on_change = self._room_changed
        metrics.requests_waiting.set_function(lambda: self.num_waiting)
        for role in Role:
            metrics.usable_replicas.labels(role).set_function(partial(replicas.num_usable, role))
        metrics.tenants_at_share.set_function(lambda: self._shares.num_lines)

    @property
    def num_waiting(self) -> int:
        """Requests, for a replica with room or for their tenant's turn."""
        return len(self._gate) + self._shares.num_waiting

    @property
    def held(self) -> Mapping[str, Places]:
        """Places that requests of each tenant have, admitted by this router and not over yet."""
        return self._shares.held

    @asynccontextmanager
    async def admit(self, request: SequenceRequest, *, only: int | None = None) -> AsyncIterator[Pair]:
        """The cheapest pair with room, at the request's turn; its tenant has so much less until the block ends. What is
        booked for it, `give_back` takes back. only: of this revision.

        Raises CapacityError, at once where its turn is predicted to come too late, and RequestError when no replica
        could ever hold the request. ModelAway where nobody who answers has come in time; at once where there has been
        nobody for so long.
        """
        self.availability.check(within_s=self._queue_s)
        began_at, is_in = self._now(), False
        asked = self._asked(request, only=only)
        self._check_fit(request, share=self._tenant_share())
        limit_s = self._queue_s if request.deadline_s is None else min(request.deadline_s, self._queue_s)
        places = Places(asked.need.num_streams, asked.need.num_blocks)
        if request.priority >= OFFLINE:
            enter = self._enter_last(asked, places, within_s=limit_s)
        else:
            enter = self._enter(asked, places, within_s=limit_s)
        try:
            async with enter as pair:
                is_in = True
                if only is None:  # else nobody waits for it
                    self._metrics.queue_time.observe(self._now() - began_at)
                yield pair
        except CapacityError as error:
            if not is_in and self.availability.look() is not None:
                raise self.availability.error() from error
            raise

    async def choose(self, request: SequenceRequest, *, avoid: Set[str], served_by: int | None = None) -> Pair:
        """The cheapest pair for a request that was admitted before, room or no room. Waits while there is none at all.

        Replicas in `avoid` are the last resort. served_by: the revision of an earlier pair. Raises as `admit`, and
        DeadlineExceeded.
        """
        asked = self._asked(request)
        wait_s = self._queue_s if request.deadline_s is None else min(self._queue_s, request.deadline_s)
        give_up_at = self._now() + wait_s
        while True:
            self.availability.check()
            self._check_fit(request, share=1.0)
            decodes = self._loads(Role.DECODE, asked)
            # A prompt may wait behind others where the beginning of it is.
            for revision in self.revisions.after(served_by, untried={load.replica for load in decodes} - avoid):
                if pair := self._choose(asked, with_room(decodes, asked.need), revision, avoid=avoid):
                    return pair
                if pair := self._choose_local_decode(asked, decodes, revision, avoid=avoid):
                    return pair
                if pair := self._choose(asked, decodes, revision, avoid=avoid):
                    return pair
            try:
                await self.replicas.changed(timeout_s=give_up_at - self._now())
            except TimeoutError:
                if wait_s == request.deadline_s:
                    raise DeadlineExceeded(f"request {request.id}: no decode replica came in its time") from None
                raise self.availability.error() from None

    def give_back(self, pair: Pair) -> None:
        """A pair is not used any more."""
        pair.release()
        self._room_changed()

    def another_prefill(self, request: SequenceRequest, pair: Pair, *, avoid: Set[str]) -> Pair | None:
        """The same pair with another prefill replica, for a request whose decode replica waits for its prompt."""
        if pair.decode is None:
            return None
        asked = self._asked(request)
        depths, decode = self._depths(asked), pair.decode
        prefills = [load for load in self._loads(Role.PREFILL, asked) if self.revisions.meet(load.replica, decode.id)]
        decision = self._chooser.choose_prefill(asked.need, prefills, decode.load(), depths, avoid=avoid)
        if decision is None:
            return None
        return self._booked(asked, decision, decode, pair.decode_booking, pair.revision)

    def another_decode(self, request: SequenceRequest, source: str) -> DecodeStream | None:
        """A decode replica for a choice on `source`, which drains, with room if any has; and a stream key there."""
        asked = self._asked(request)
        depths = self._depths(asked)
        decodes = self._loads(Role.DECODE, asked)
        decodes = [load for load in decodes if self.revisions.may_move(source, load.replica)]
        for some in (with_room(decodes, asked.need), decodes):
            decision = self._chooser.choose(asked.need, [], some, depths)
            if decision and (replica := self._replica(decision.decode)):
                return DecodeStream(replica, self.replicas.new_streams(1))
        return None

    def prompt_parts(self, request: SequenceRequest) -> PromptParts:
        """For what a replica will say of its prompt."""
        return PromptParts(request, vocab_size=self._vocab_size)

    def num_blocks(self, request: SequenceRequest) -> int:
        """That it is predicted to need on a decode replica."""
        return self._need(request).num_blocks

    def may_try_again(self, error: ClusterError, avoid: Set[str]) -> bool:
        """Whether another try may help. Where every decode replica is full, the client hears so at once."""
        if isinstance(error, CapacityError):
            return any(replica.id not in avoid for replica in self._answerers())
        return may_retry(error)

    def may_answer(self) -> bool:
        """Whether there is anybody who finishes answers."""
        return any(True for _ in self._answerers())

    def finished(self, num_tokens: Iterable[int]) -> None:
        """Answers have come to their end, with so many tokens."""
        for number in num_tokens:
            self._answers.add(number)

    @asynccontextmanager
    async def _enter(self, asked: _Asked, places: Places, *, within_s: float) -> AsyncIterator[Pair]:
        """First its tenant's turn, then its own."""
        give_up_at = self._now() + within_s
        async with self._shares.enter(self._queued(asked.request), places, within_s=within_s) as held:
            pair = await self._gate.enter(
                self._queued(asked.request),
                lambda: self._choose_with_room(asked),
                within_s=give_up_at - self._now(),
                give_back=self.give_back,
            )
            self._shares.booked(held)
            yield pair

    @asynccontextmanager
    async def _enter_last(self, asked: _Asked, places: Places, *, within_s: float) -> AsyncIterator[Pair]:
        """When nobody else waits, not even of its tenant: nothing is held for it before."""

        held: Held | None = None

        def choose() -> Pair | None:
            nonlocal held
            if (taken := self._shares.take_now(asked.request.tenant, places)) is None:
                return None
            pair = None
            try:
                pair = self._choose_with_room(asked)
            finally:
                if pair is None:
                    self._shares.give_back(taken, wakes=False)
            if pair:
                held = taken
                self._shares.booked(held)
            return pair

        try:
            queued = self._queued(asked.request)
            yield await self._gate.enter_last(queued, choose, within_s=within_s, give_back=self.give_back)
        finally:
            if held:
                self._shares.give_back(held)

    def _room_changed(self) -> None:
        self._shares.room_changed()
        self._gate.wake()

    def _free_places(self) -> Places:
        """Of all decode replicas, and of prefill replicas for guests."""
        free = NO_PLACES
        for replica in self.replicas.usable(Role.DECODE):
            load = replica.load()
            free = free.plus(Places(load.free_streams, load.free_blocks))
        for replica in self.replicas.usable(Role.PREFILL):
            load = replica.load()
            free = free.plus(Places(load.free_local_decodes, load.free_local_decode_blocks))
        return free

    def _answerers(self) -> Iterator[Replica]:
        """Decode replicas, and prefill replicas that take guests."""
        yield from self.replicas.usable(Role.DECODE)
        yield from (replica for replica in self.replicas.usable(Role.PREFILL) if replica.member.max_local_decodes)

    def _queued(self, request: SequenceRequest) -> QueuedRequest:
        return QueuedRequest(request.tenant, request.priority, cost=self._cost(request), user=request.user)

    def _choose_with_room(self, asked: _Asked) -> Pair | None:
        self.availability.check()
        self._check_fit(asked.request, share=1.0)  # the first replica may have come only now
        decodes = self._loads(Role.DECODE, asked)
        some = with_room(decodes, asked.need) or self._owed(asked, decodes)
        usable = [load.replica for load in decodes] or [replica.id for replica in self._answerers()]
        for revision in self.revisions.first_to_last(asked.request, usable=usable, only=asked.only):
            if pair := self._choose(asked, some, revision, prefill_needs_room=True):
                return pair
            if pair := self._choose_local_decode(asked, decodes, revision, prefill_needs_room=True):
                return pair
        return None

    def _owed(self, asked: _Asked, decodes: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
        """Those that make way for it (engine.admission), where answers of others have grown into what its tenant is
        owed: the blocks that no other one may have alone."""
        if asked.request.priority >= OFFLINE:
            return []
        own = self._shares.held.get(asked.request.tenant, NO_PLACES)
        all_blocks = sum(load.member.num_blocks for load in decodes)
        if own.num_blocks > (1 - self._tenant_share()) * all_blocks:
            return []
        return [load for load in decodes if asked.need.num_streams <= load.free_streams]

    def _choose(
        self,
        asked: _Asked,
        decodes: Sequence[ReplicaLoad],
        revision: Revision | None,
        *,
        avoid: Set[str] = frozenset(),
        prefill_needs_room: bool = False,
    ) -> Pair | None:
        """The pair that is decided on, booked; None where there is none. revision: both are of it; None: all are."""
        if not (decodes := _of_revision(revision, decodes)):
            return None
        prefills = _of_revision(revision, self._loads(Role.PREFILL, asked))
        depths = self._depths(asked)
        decision = self._chooser.choose(
            asked.need, prefills, decodes, depths, avoid=avoid, prefill_needs_room=prefill_needs_room
        )
        return self._taken(asked, decision, revision) if decision else None

    def _choose_local_decode(
        self,
        asked: _Asked,
        decodes: Sequence[ReplicaLoad],
        revision: Revision | None,
        *,
        avoid: Set[str] = frozenset(),
        prefill_needs_room: bool = False,
    ) -> Pair | None:
        """The same with a prefill replica that answers all by itself, if none of these decode replicas has room and
        waiting for it is dearer. What nobody waits for does not take such a place, but where there is no other."""
        decodes = _of_revision(revision, decodes)
        is_urgent = asked.only is None and asked.request.priority < OFFLINE
        if (decodes and not is_urgent) or with_room(decodes, asked.need):
            return None
        prefills = _of_revision(revision, self._loads(Role.PREFILL, asked))
        hosts = [
            load
            for load in with_room_for_local_decode(prefills, asked.need)
            if load.replica not in avoid and (load.has_room_to_prefill or not prefill_needs_room)
        ]
        if not hosts:
            return None
        decision = self._chooser.choose_local_decode(
            asked.need,
            hosts,
            prefills,
            decodes,
            self._depths(asked),
            num_waiting=self.num_waiting,
            answer_tokens=self._answers.predict(_ANY_LENGTH),
        )
        if decision is None:
            return None
        self._metrics.local_decodes.inc()
        return self._taken(asked, decision, revision)

    def _taken(self, asked: _Asked, decision: Decision, revision: Revision | None) -> Pair:
        """The pair of a decision, booked."""
        if asked.only is None:  # else it is no request of a client's, and would push one out
            self.decisions.add(asked.request.id, decision.options, decision.candidates)
        logger.debug("route request=%s %s", asked.request.id, decision.options[0])
        decode = self._replica(decision.decode)
        if (decision.decode and not decode) or (decision.prefill and not self._replica(decision.prefill)):
            raise ClusterError(f"the routing policy named {decision.options[0]}: no such replica")
        need = asked.need
        booking = Booking(decode, num_blocks=need.num_blocks, num_streams=need.num_streams) if decode else None
        return self._booked(asked, decision, decode, booking, revision.number if revision else None)

    def _booked(
        self, asked: _Asked, decision: Decision, decode: Replica | None, booking: Booking | None, revision: int | None
    ) -> Pair:
        """The pair of a decision, with its prompt booked where it is to be computed."""
        prefill = self._replica(decision.prefill)
        computes = prefill or decode
        assert computes
        return Pair(
            prefill=prefill,
            decode=decode,
            prompt_booking=PromptBooking(
                computes, self.replicas.index, asked.hashes, num_tokens=decision.prompt_tokens
            ),
            decode_booking=booking,
            prefix_source=decision.prefix_source,
            revision=revision,
        )

    def _asked(self, request: SequenceRequest, *, only: int | None = None) -> _Asked:
        root = root_hash(self._model, adapter=request.adapter, salt=request.salt)
        hashes = block_hashes(root, request.token_ids, block_size=self._block_size)
        return _Asked(request, self._need(request), hashes, only)

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

    def _cost(self, request: SequenceRequest) -> float:
        return float(len(request.token_ids) + self._predicted_tokens(request) * len(request.choices))

    def _loads(self, role: Role, asked: _Asked) -> list[ReplicaLoad]:
        """Of those that would not pass over what is asked."""
        usable = self.replicas.usable(role)
        return [replica.load() for replica in usable if replica.member.understands(asked.request)]

    def _depths(self, asked: _Asked) -> Mapping[str, Depths]:
        """Who has how much of the prompt that need not be computed again: nobody, where all of it must be."""
        return {} if asked.request.num_prompt_logprobs is not None else self.replicas.index.depths(asked.hashes)

    def _replica(self, name: str | None) -> Replica | None:
        return self.replicas.get(name) if name else None

    def _check_fit(self, request: SequenceRequest, *, share: float) -> None:
        check_fit(request, [replica.member for replica in self.replicas.usable(Role.DECODE)], share=share)


def may_retry(error: ClusterError) -> bool:
    """Whether another replica may succeed where this error came from one."""
    return isinstance(error, ReplicaLost | CapacityError | TransferError) and not isinstance(error, LayoutMismatch)


def _of_revision(revision: Revision | None, loads: Sequence[ReplicaLoad]) -> Sequence[ReplicaLoad]:
    """Those of its replicas; None: all."""
    return [load for load in loads if load.replica in revision.replicas] if revision else loads
