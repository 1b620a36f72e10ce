"""Simulated cluster: the real router's index, queue and policy on top of simulated replicas."""

from __future__ import annotations

import functools
import gc
import math
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from core.index.prefix_index import NOTHING, Depths
from core.trace.trace import TraceRequest
from core.types.handoff import ROOM_TOKENS
from core.types.prefix_hash import expected_hashes
from core.types.request import Role
from core.types.step_timing import StepTiming
from planner.simulator.clock import Action, Clock, Cores
from planner.simulator.decode_replica import DecodeReplica
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import FleetSetup, Profile
from planner.simulator.replica import Flight, PrefillReplica, Replica, serving
from planner.simulator.store import Indexes, Site
from router.routing.admission_queue import AdmissionQueue
from router.routing.candidates import MAX_BACKLOG_S, CandidateReplica, Option, RoutingRequest
from router.routing.chooser import AnswerLength
from router.routing.fair_queue import QueuedRequest
from router.routing.policies import make_policy

_ANY_LENGTH = 1 << 31  # tokens


class Fleet:
    """Simulated cluster that serves the requests of one trace and records the results."""

    def __init__(self, setup: FleetSetup, profile: Profile, hashes: PrefixHashes) -> None:
        if setup.host_tokens:
            # A simulated host tier keeps whole blocks, so with one, layers with a window keep whole contexts.
            profile = profile.model_copy(update={"kv": profile.kv.model_copy(update={"window": 0})})
        self.clock = Clock()
        self.prefills: dict[str, PrefillReplica] = {}
        self.decodes: dict[str, DecodeReplica] = {}
        # Results.
        self.flights: list[Flight] = []  # all requests so far, in order of arrival
        self.gap_s, self.gap_counts = array("d"), array("q")  # between tokens, and how many gaps of this length
        self.decision_s = array("d")  # real time of each routing decision
        self.shipped_bytes = self.fetched_bytes = 0.0
        self.num_refused = 0  # requests whose prompt exceeds a replica's pool
        self._setup = setup
        self._profile = profile
        self._hashes = hashes
        self._wire_cache = profile.kv.wire_cache(setup.block_size)
        self._indexes = Indexes(cache=self._wire_cache, has_host=setup.host_tokens > 0)
        cores = Cores(self.clock, profile.slowdown)
        self._site = Site(setup=setup, profile=profile, clock=self.clock, cores=cores, indexes=self._indexes)
        self._policy = make_policy(setup.policy, prefix_fetches=setup.prefix_fetches)
        self._queue = AdmissionQueue(max_waiting=sys.maxsize)  # as in the live router, with a single tenant
        self._waiting: dict[QueuedRequest, Flight] = {}
        self._looks_at = -1.0  # time of the next scheduled look for room
        self._usual_answer = AnswerLength()
        self._num_added = dict.fromkeys(Role, 0)
        for role, count in ((Role.PREFILL, setup.num_prefill), (Role.DECODE, setup.num_decode)):
            for _ in range(count):
                self.add(role)

    def run(self, trace: Sequence[TraceRequest]) -> None:
        """Serve the trace, until nothing is left to do."""
        arrivals = iter(trace)

        def schedule_next() -> None:
            """Schedule the arrivals one at a time, so the clock never holds more than the next one."""
            if request := next(arrivals, None):
                self.clock.at(request.arrival_s, lambda: arrive(request))

        def arrive(request: TraceRequest) -> None:
            schedule_next()
            self.arrive(request)

        was_enabled = gc.isenabled()
        gc.disable()  # the collector would free nothing, but traverse millions of hashes repeatedly
        try:
            schedule_next()
            self.clock.run()
        finally:
            if was_enabled:
                gc.enable()

    def arrive(self, request: TraceRequest) -> None:
        """Route a request, or queue it until replicas have room."""
        if (flight := self._add_flight(request)) is None:
            return
        if self._setup.waits_in_router:
            queued = QueuedRequest("", 0, float(request.num_tokens + self._usual_answer.predict(_ANY_LENGTH)))
            self._waiting[queued] = flight
            self._queue.add(queued, within_s=math.inf, now=self.clock.now)
            if not self._queue.is_blocked:
                self._look_for_room()
        else:
            self._send(flight, serving(self.prefills), serving(self.decodes))

    def _add_flight(self, request: TraceRequest, decode: str = "", *, num_generated: int = 0) -> Flight | None:
        """Record a request. Return None if its prompt exceeds a pool; a full pool ends its answer, as it does live."""
        room = self._setup.kv_tokens // self._setup.block_size * self._setup.block_size - request.num_tokens
        if room <= num_generated:
            self.num_refused += 1
            return None
        request = replace(request, num_output=min(request.num_output, room))
        flight = Flight(request, self._hashes.of(request), Option(prefill=None, decode=decode))
        self.flights.append(flight)
        return flight

    # Adding and removing replicas

    def add(self, role: Role) -> str:
        """Add a replica, which serves from now on. Return its name; names are never reused."""
        number = self._num_added[role]
        self._num_added[role] += 1
        name = f"{role.value}-{number}"
        if role is Role.PREFILL:
            self.prefills[name] = PrefillReplica(name, self._site, finished=self._prefilled)
        else:
            self.decodes[name] = DecodeReplica(
                name,
                self._site,
                seed=number,
                admitted=self._admitted,
                reserved=self._copy,
                prefilled=self._answered,
                gaps=self._record_gaps,
                ended=self._ended,
                leaving=self._move,
            )
        self.clock.at(self.clock.now, self._look_for_room)
        return name

    def retire(self, role: Role, then: Action) -> str:
        """Drain the replica with the fewest requests, remove it when it is empty, and call `then`. Return its name.

        Its prompts are completed; its answers move to other replicas with their KV.
        """
        replica = min(self.serving(role), key=lambda replica: replica.num_open)
        replica.drain(then)
        self._remove_if_empty(replica)
        return replica.name

    def serving(self, role: Role) -> Sequence[Replica]:
        """Return the replicas of a role that get new requests."""
        return serving(self.prefills) if role is Role.PREFILL else serving(self.decodes)

    def warm(self, past: Iterable[TraceRequest]) -> None:
        """Cache the prompts of past requests where the router would have sent them. Call before the first arrival."""
        names = list(self.prefills) or list(self.decodes)
        for number, request in enumerate(past):
            hashes = self._hashes.of(request)
            held = self._indexes.device.match(hashes)
            store = self._replica(max(held, key=lambda name: held[name]) if held else names[number % len(names)]).store
            store.blocks.free(store.restore(hashes))
            store.publish()

    def place(self, request: TraceRequest, num_generated: int) -> None:
        """Place a running answer with num_generated tokens on a decode replica. Call before the first arrival."""
        replica = min(serving(self.decodes), key=lambda replica: replica.num_streams)
        flight = self._add_flight(request, replica.name, num_generated=num_generated)
        if flight is None:
            return
        flight.reserved_at = num_generated
        self._join(flight, replica)
        replica.reserve(flight, num_generated)

    def _remove_if_empty(self, replica: Replica) -> None:
        if (then := replica.on_empty) and not replica.num_open:
            self.prefills.pop(replica.name, None)
            self.decodes.pop(replica.name, None)
            # Scheduled, so that the replica whose step is ending can still publish its blocks.
            self.clock.at(self.clock.now, functools.partial(self._removed, replica.name, then))

    def _removed(self, name: str, then: Action) -> None:
        self._indexes.drop(name)
        then()

    def _join(self, flight: Flight, replica: Replica) -> None:
        if replica not in flight.replicas:
            flight.replicas.append(replica)
            replica.num_open += 1

    def _leave(self, flight: Flight, *replicas: Replica) -> None:
        for replica in replicas:
            flight.replicas.remove(replica)
            replica.num_open -= 1
            self._remove_if_empty(replica)

    def _replica(self, name: str) -> Replica:
        return self.prefills.get(name) or self.decodes[name]

    # Waiting for room

    def _look_for_room(self) -> None:
        """Admit queued requests while there is room, and schedule the next look."""
        now = self.clock.now
        self._queue.run(self._take, now=now)
        if not len(self._queue) or self._looks_at > now:
            return
        # The first prefill replica's backlog is then short enough for another prompt.
        room_at = min((replica.busy_until for replica in serving(self.prefills)), default=0.0) - MAX_BACKLOG_S
        if times := [when for when in (room_at, self._queue.changes_at()) if when is not None and when > now]:
            self._looks_at = min(times)
            self.clock.at(self._looks_at, self._look_for_room)

    def _take(self, queued: QueuedRequest) -> bool:
        """Send a request if replicas have room, by the rules of ReplicaLoad. Return whether it was sent."""
        flight, all_prefills = self._waiting[queued], serving(self.prefills)
        prefills = [replica for replica in all_prefills if replica.queue_s <= MAX_BACKLOG_S + 1e-9]
        if all_prefills and not prefills:
            return False
        num_blocks = -(-(flight.request.num_tokens + self._usual_answer.predict(_ANY_LENGTH)) // self._setup.block_size)
        decodes = [replica for replica in serving(self.decodes) if replica.has_room(num_blocks)]
        if not decodes:
            return False
        del self._waiting[queued]
        flight.promised_blocks = num_blocks
        self._send(flight, prefills, decodes)
        return True

    # Choosing replicas

    def _send(self, flight: Flight, prefills: Sequence[PrefillReplica], decodes: Sequence[DecodeReplica]) -> None:
        begin = time.perf_counter()
        option, flight.compute_s = self._choose(flight, prefills, decodes)
        self.decision_s.append(time.perf_counter() - begin)
        flight.option, computes = option, self._replica(option.prefill or option.decode)
        for name in filter(None, (option.prefill, option.decode, option.fetch_from)):
            self._join(flight, self._replica(name))
        computes.expect(flight.compute_s)
        cache, num_tokens = self._wire_cache, flight.request.num_tokens
        flight.expected = expected_hashes(
            flight.hashes, num_tokens=num_tokens, block_size=cache.block_size, num_checkpoints=cache.num_checkpoints
        )
        self._indexes.device.expect(computes.name, flight.expected)
        if option.fetch_from:
            self._fetch(flight, self._replica(option.fetch_from), computes)
        elif self._profile.request_s:
            self.clock.at(self.clock.now + self._profile.request_s, lambda: self._submit(flight))
        else:
            self._submit(flight)

    def _choose(
        self, flight: Flight, prefills: Sequence[PrefillReplica], decodes: Sequence[DecodeReplica]
    ) -> tuple[Option, float]:
        """Return the policy's option, and the predicted time to compute the prompt."""
        demand = RoutingRequest(
            num_tokens=flight.request.num_tokens, cache=self._wire_cache, max_local_tokens=self._setup.max_local_tokens
        )
        depths = self._indexes.depths(flight.hashes, {*self.prefills, *self.decodes})
        # Without prefill replicas, the steps of decode replicas usually have prompts.
        prefill_views = [self._view(replica, replica.timing, depths) for replica in prefills]
        decode_views = [
            self._view(replica, replica.decode_timing if self.prefills else replica.timing, depths)
            for replica in decodes
        ]
        option = self._policy.options(demand, prefill_views, decode_views)[0]
        # Computed here, because baseline policies predict no compute time, and queues would stay empty.
        computes = option.prefill or option.decode
        view = next(view for view in (*prefill_views, *decode_views) if view.replica == computes)
        return option, view.compute_s(demand, max(view.cached_tokens, option.fetch_tokens))

    def _view(
        self, replica: Replica, timing: StepTiming, depths: tuple[Mapping[str, Depths], Mapping[str, Depths]]
    ) -> CandidateReplica:
        setup, blocks = self._setup, replica.store.blocks
        held, stored = (found.get(replica.name, NOTHING) for found in depths)
        return CandidateReplica(
            replica=replica.name,
            cached_tokens=held.device * setup.block_size,
            stored_tokens=max(held.device, stored.device) * setup.block_size,
            held_tokens=held.blocks * setup.block_size,
            queue_s=replica.queue_s,
            num_streams=replica.num_streams,
            num_blocks=blocks.num_blocks,
            available_blocks=blocks.num_usable,
            timing=timing,
            max_batch_tokens=replica.max_batch_tokens,
            link_bytes_per_s=self._profile.link.bytes_per_s,
            restore_bytes_per_s=self._profile.host_bytes_per_s if setup.host_tokens else 0.0,
            tokens_per_row=max(1.0, replica.row_yield.tokens_per_row),
            drafted_per_row=replica.row_yield.drafted_per_row,
        )

    # Prefix fetches

    def _fetch(self, flight: Flight, source: Replica, target: Replica) -> None:
        """Fetch the prefix to the replica that computes the prompt, then submit the request."""
        size, kv, link = self._setup.block_size, self._profile.kv, self._profile.link
        num_tokens, blocks = flight.option.fetch_tokens, target.store.blocks
        hashes = flight.hashes[: num_tokens // size]
        if source is target:
            num_bytes = kv.pool_cache(size).shipped_bytes(len(hashes) * size, held=blocks.match(hashes) * size)
            arrives = source.send(num_bytes, self._profile.host_bytes_per_s, link="host")
        else:
            held = blocks.match_reusable(hashes) * size
            num_bytes = self._wire_cache.shipped_bytes(len(hashes) * size, held=held)
            self.fetched_bytes += num_bytes
            arrives = source.send(num_bytes, link.bytes_per_s) + link.latency_s
        self.clock.at(arrives, lambda: self._fetched(flight, source, target, hashes))

    def _fetched(self, flight: Flight, source: Replica, target: Replica, hashes: list[bytes]) -> None:
        """Store the fetched blocks. Those that the source has evicted since are computed instead."""
        hashes = hashes[: source.store.num_fetchable(hashes)]
        flight.restored = target.store.restore(hashes)
        if source is not target:
            source.store.blocks.spare(hashes)
        target.store.publish()
        self._submit(flight)

    # Path of a request

    def _submit(self, flight: Flight) -> None:
        self.decodes[flight.option.decode].submit(flight)

    def _admitted(self, flight: Flight) -> None:
        assert flight.option.prefill
        self.prefills[flight.option.prefill].submit(flight)

    def _prefilled(self, prefill: PrefillReplica, flight: Flight) -> None:
        """Record the first token and ship the rest of the KV.

        Earlier layers were sent while later ones were computed, so what remains is the last layer, or whatever the link
        has not carried yet.
        """
        kv, link, decode = self._profile.kv, self._profile.link, self.decodes[flight.option.decode]
        flight.first_token_at = flight.last_token_at = self.clock.now
        self._answered(prefill, flight)
        held = decode.sequence_of(flight).num_computed
        num_bytes = self._wire_cache.shipped_bytes(flight.request.num_tokens, held=held)
        self.shipped_bytes += num_bytes
        hidden = min(flight.compute_s * link.bytes_per_s, num_bytes * (1 - 1 / kv.num_layers))
        landed = prefill.send(num_bytes - hidden, link.bytes_per_s) + link.latency_s
        self.clock.at(landed, lambda: self._landed(prefill, flight))

    def _landed(self, prefill: PrefillReplica, flight: Flight) -> None:
        prefill.release(flight)
        self.decodes[flight.option.decode].land(flight)

    def _answered(self, replica: Replica, flight: Flight) -> None:
        """Record that a replica has computed a prompt."""
        self._indexes.device.settle(replica.name, flight.expected)
        replica.settle()
        self._look_for_room()

    def _record_gaps(self, seconds: float, count: int) -> None:
        self.gap_s.append(seconds)
        self.gap_counts.append(count)

    def _ended(self, flight: Flight) -> None:
        flight.hashes = flight.expected = []
        if target := flight.moves_to:
            flight.moves_to = None
            self.decodes[target].give_up(flight)
        self._leave(flight, *flight.replicas)
        self._usual_answer.add(flight.request.num_output)
        self._look_for_room()

    # Moving an answer off a draining decode replica

    def _move(self, source: DecodeReplica, flight: Flight) -> None:
        if not (others := serving(self.decodes)):
            return  # no other replica yet
        target = min(others, key=lambda replica: replica.num_streams)
        flight.moves_to = target.name
        self._join(flight, target)
        flight.reserved_at = source.sequence_of(flight).num_generated
        target.reserve(flight, flight.reserved_at)

    def _copy(self, flight: Flight) -> None:
        """Ship an answer's KV to its target, which has reserved blocks for it."""
        source, link = self.decodes[flight.option.decode], self._profile.link
        if flight.moves_to is None:  # initially placed, so it needs no transfer
            self.clock.at(self.clock.now, lambda: source.take_over(flight, flight.reserved_at))
            return
        num_bytes = self._wire_cache.shipped_bytes(flight.request.num_tokens + source.sequence_of(flight).num_generated)
        self.shipped_bytes += num_bytes
        copied = source.send(num_bytes, link.bytes_per_s) + link.latency_s
        self.clock.at(copied, lambda: self._copied(flight, source))

    def _copied(self, flight: Flight, source: DecodeReplica) -> None:
        if flight.moves_to is None:
            return  # the answer has ended
        if source.sequence_of(flight).num_generated + 1 < flight.reserved_at + ROOM_TOKENS:
            source.hand_over(flight, lambda num_generated: self._moved(flight, source, num_generated))
            return
        # The answer has outgrown the blocks reserved while it waited at the target: try again.
        target = self.decodes[flight.moves_to]
        target.give_up(flight)
        self._leave(flight, target)
        self._move(source, flight)

    def _moved(self, flight: Flight, source: DecodeReplica, num_generated: int) -> None:
        assert flight.moves_to
        target, flight.moves_to = self.decodes[flight.moves_to], None
        flight.option = replace(flight.option, decode=target.name)
        target.take_over(flight, num_generated)
        if source.name != flight.option.fetch_from:
            self._leave(flight, source)
