"""Simulated cluster: the real router's index, queue and policy on top of simulated replicas."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from core.index.prefix_index import NOTHING, Depths
from core.trace.trace import TraceRequest
from core.types.handoff import ROOM_TOKENS
from core.types.request import Role
from core.types.step_timing import StepTiming
from planner.simulator.clock import Action, Clock
from planner.simulator.cores import Cores
from planner.simulator.decode_replica import DecodeReplica
from planner.simulator.drafts import SimulatedDrafts
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.flight import Flight
from planner.simulator.prefill_replica import PrefillReplica
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import Profile
from planner.simulator.report import Report
from planner.simulator.store import Indexes, Store
from router.routing.admission import AdmissionQueue
from router.routing.chooser import AnswerLength
from router.routing.fair_queue import QueuedRequest
from router.routing.plain_policies import make_policy
from router.routing.policy import CandidateReplica, Option, RoutingRequest

_MAX_BACKLOG_S = 1.0  # as in router/routing/replica_load.py
_ANY_LENGTH = 1 << 31  # tokens


@dataclass(frozen=True, kw_only=True)
class ReplicaUse:
    """Utilization of one simulated replica."""

    queue_s: float  # time to compute the queued prompts
    num_streams: int
    kv_share: float  # share of KV blocks in use


class Fleet:
    """Simulated cluster that serves the requests of one trace and records them in `report`."""

    def __init__(self, setup: FleetSetup, profile: Profile, hashes: PrefixHashes, clock: Clock, report: Report) -> None:
        self._setup = setup
        self._profile = profile
        self._timing = {
            Role.PREFILL: profile.timing_of(setup.prefill_width),
            Role.DECODE: profile.timing_of(setup.decode_width),
        }
        self._decode_timing = profile.decode_timing_of(setup.decode_width)
        self._cores = Cores(clock, profile.slowdown) if profile.slowdown else None
        # A simulated host tier keeps whole blocks, so layers with a window keep whole contexts beside it.
        self._kv = profile.kv.model_copy(update={"window": 0}) if setup.host_tokens else profile.kv
        self._wire_cache = self._kv.wire_cache(setup.block_size)
        self._pool_cache = replace(self._wire_cache, token_bytes=self._kv.bytes_per_token)
        self._clock = clock
        self._report = report
        self._policy = make_policy(setup.policy, prefix_fetches=setup.prefix_fetches)
        self._indexes = Indexes(cache=self._wire_cache, has_host=setup.host_tokens > 0)
        self._hashes = hashes
        self._next_number = {role: 0 for role in Role}
        self._leaving: dict[str, Action] = {}  # draining replicas, and the action to run when they are empty
        self._queue = AdmissionQueue(max_waiting=sys.maxsize)  # as in the live router, with a single tenant
        self._waiting: dict[QueuedRequest, Flight] = {}
        self._looks_at = -1.0  # time of the next scheduled look for room
        self._usual_answer = AnswerLength()
        self._num_open: Counter[str] = Counter()  # open requests in which a replica takes part
        self.prefills: dict[str, PrefillReplica] = {}
        self.decodes: dict[str, DecodeReplica] = {}
        self.drafts: dict[str, SimulatedDrafts] = {}  # by decode replica; empty without drafts
        for _ in range(setup.num_prefill):
            self.add(Role.PREFILL)
        for _ in range(setup.num_decode):
            self.add(Role.DECODE)
        self._busy_until: dict[str, float] = {}  # predicted end of the prompts sent to each replica
        self._unanswered: dict[str, int] = {}
        self._link_free_at: dict[tuple[str, str], float] = {}

    def arrive(self, request: TraceRequest) -> Flight:
        """Route a request, or queue it until replicas have room."""
        flight = Flight(request, self._hashes.of(request), Option(prefill=None, decode=""), 0.0)
        if self._setup.waits_in_router:
            queued = QueuedRequest("", 0, float(request.num_tokens + self._usual_answer.predict(_ANY_LENGTH)))
            self._waiting[queued] = flight
            self._queue.add(queued, within_s=math.inf, now=self._clock.now)
            if not self._queue.is_blocked:
                self._look_for_room()
        else:
            self._send(flight, self.serving(Role.PREFILL), self.serving(Role.DECODE))
        return flight

    def _look_for_room(self) -> None:
        """Admit queued requests while there is room, and schedule the next look."""
        now = self._clock.now
        self._queue.run(self._take, now=now)
        if not len(self._queue) or self._looks_at > now:
            return
        times = [when for when in (self._room_at(), self._queue.changes_at()) if when is not None and when > now]
        if times:
            self._looks_at = min(times)
            self._clock.at(self._looks_at, self._look_for_room)

    def _take(self, queued: QueuedRequest) -> bool:
        """Send a request if replicas have room, by the rules of ReplicaLoad. Return whether it was sent."""
        flight = self._waiting[queued]
        now, all_prefills = self._clock.now, self.serving(Role.PREFILL)
        prefills = [name for name in all_prefills if self._busy_until.get(name, 0.0) - now <= _MAX_BACKLOG_S + 1e-9]
        if all_prefills and not prefills:
            return False
        num_blocks = -(-(flight.request.num_tokens + self._usual_answer.predict(_ANY_LENGTH)) // self._setup.block_size)
        decodes = [name for name in self.serving(Role.DECODE) if self.decodes[name].has_room(num_blocks)]
        if not decodes:
            return False
        del self._waiting[queued]
        flight.promised_blocks = num_blocks
        self._send(flight, prefills, decodes)
        return True

    def _room_at(self) -> float:
        """Return the time at which the first prefill replica's backlog is short enough for another prompt."""
        free_at = [self._busy_until.get(name, 0.0) for name in self.serving(Role.PREFILL)]
        return min(free_at, default=0.0) - _MAX_BACKLOG_S

    def _send(self, flight: Flight, prefills: list[str], decodes: list[str]) -> None:
        hashes = flight.hashes
        begin = time.perf_counter()
        option, compute_s = self._choose(flight.request, hashes, prefills, decodes)
        self._report.decided(time.perf_counter() - begin)
        flight.option, flight.compute_s = option, compute_s
        computes = option.prefill or option.decode
        flight.with_replicas = {name for name in (option.prefill, option.decode, option.fetch_from) if name}
        self._num_open.update(flight.with_replicas)
        now = self._clock.now
        self._busy_until[computes] = max(now, self._busy_until.get(computes, 0.0)) + compute_s
        self._unanswered[computes] = self._unanswered.get(computes, 0) + 1
        self._indexes.expect(computes, hashes, num_tokens=flight.request.num_tokens)
        if option.fetch_from is None and self._profile.request_s:
            self._clock.at(now + self._profile.request_s, lambda: self._submit(flight))
        elif option.fetch_from is None:
            self._submit(flight)
        else:
            self._fetch(flight, option.fetch_from, computes)

    # Adding and removing replicas

    def add(self, role: Role) -> str:
        """Add a replica, which serves from now on. Return its name; names are never reused."""
        name = f"{role.value}-{self._next_number[role]}"
        self._next_number[role] += 1
        if role is Role.PREFILL:
            self.prefills[name] = self._prefill(name)
        else:
            self.decodes[name] = self._decode(name)
        self._clock.at(self._clock.now, self._look_for_room)
        return name

    def retire(self, role: Role, then: Action) -> str:
        """Drain the replica with the fewest requests, remove it when it is empty, and call `then`. Return its name.

        Its prompts are completed; its answers move to other replicas with their KV.
        """
        name = min(self.serving(role), key=lambda name: self._num_open[name])
        self._leaving[name] = then
        if leaving := self.decodes.get(name):
            leaving.leave(lambda flight: self._move(flight, name))
        self._let_go([name])
        return name

    def serving(self, role: Role) -> list[str]:
        """Return the replicas of a role that get new requests."""
        replicas = self.prefills if role is Role.PREFILL else self.decodes
        return [name for name in replicas if name not in self._leaving]

    def warm(self, past: Iterable[TraceRequest]) -> None:
        """Cache the prompts of past requests where the router would have sent them. Call before the first arrival."""
        names = list(self.prefills) or list(self.decodes)
        for number, request in enumerate(past):
            hashes = self._hashes.of(request)
            held = self._indexes.device.match(hashes)
            name = max(held, key=lambda name: held[name]) if held else names[number % len(names)]
            store = self._replica(name).store
            store.blocks.free(store.restore(hashes) or [])
            store.publish()

    def place(self, request: TraceRequest, num_generated: int) -> None:
        """Place a running answer with num_generated tokens on a decode replica. Call before the first arrival."""
        name = min(self.serving(Role.DECODE), key=lambda name: self.decodes[name].num_streams)
        option = Option(prefill=None, decode=name)
        flight = Flight(request, self._hashes.of(request), option, 0.0, reserved_at=num_generated, with_replicas={name})
        self._num_open[name] += 1
        self.decodes[name].reserve(flight, num_generated)

    def loads(self, role: Role) -> list[ReplicaUse]:
        """Return the utilization of the replicas of a role, draining ones included."""
        replicas = self.prefills if role is Role.PREFILL else self.decodes
        return [
            ReplicaUse(
                queue_s=max(0.0, self._busy_until.get(name, 0.0) - self._clock.now),
                num_streams=replica.num_streams,
                kv_share=1 - replica.store.blocks.num_usable / replica.store.blocks.num_blocks,
            )
            for name, replica in replicas.items()
        ]

    def _let_go(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._num_open[name] and (then := self._leaving.pop(name, None)):
                self.prefills.pop(name, None)
                self.decodes.pop(name, None)
                # Scheduled, so that the replica whose step is ending can still publish its blocks.
                self._clock.at(self._clock.now, functools.partial(self._gone, name, then))

    def _gone(self, name: str, then: Action) -> None:
        self._indexes.drop(name)
        then()

    def _done_with(self, *names: str) -> None:
        self._num_open.subtract(names)
        self._let_go(names)

    def _ended(self, flight: Flight) -> None:
        self._report.ended(flight)
        if target := flight.moves_to:
            flight.moves_to = None
            self.decodes[target].give_up(flight)
        self._done_with(*flight.with_replicas)
        self._usual_answer.add(flight.request.num_output)
        self._look_for_room()

    # Moving an answer off a draining decode replica

    def _move(self, flight: Flight, source: str) -> None:
        if not (others := self.serving(Role.DECODE)):
            return  # no other replica: the answer ends here
        target = min(others, key=lambda name: self.decodes[name].num_streams)
        flight.moves_to = target
        flight.with_replicas.add(target)
        self._num_open[target] += 1
        flight.reserved_at = self.decodes[source].num_generated(flight)
        self.decodes[target].reserve(flight, flight.reserved_at)

    def _copy(self, flight: Flight) -> None:
        """Ship an answer's KV to its target, which has reserved blocks for it."""
        if flight.moves_to is None:  # initially placed, so it needs no transfer
            self._clock.at(
                self._clock.now, lambda: self.decodes[flight.option.decode].take_over(flight, flight.reserved_at)
            )
            return
        source, link = flight.option.decode, self._profile.link
        num_tokens = flight.request.num_tokens + self.decodes[source].num_generated(flight)
        num_bytes = self._wire_cache.shipped_bytes(num_tokens)
        self._report.shipped_bytes += num_bytes
        copied = self._pass(source, "out", num_bytes, link.bytes_per_s) + link.latency_s
        self._clock.at(copied, lambda: self._copied(flight, source))

    def _copied(self, flight: Flight, source: str) -> None:
        if (target := flight.moves_to) is None:
            return  # the answer has ended
        if self.decodes[source].num_generated(flight) + 1 < flight.reserved_at + ROOM_TOKENS:
            self.decodes[source].hand_over(flight, lambda num_generated: self._moved(flight, source, num_generated))
            return
        # The answer has outgrown the blocks reserved while it waited at the target: try again.
        self.decodes[target].give_up(flight)
        flight.with_replicas.discard(target)
        self._done_with(target)
        self._move(flight, source)

    def _moved(self, flight: Flight, source: str, num_generated: int) -> None:
        assert flight.moves_to
        target, flight.moves_to = flight.moves_to, None
        flight.option = replace(flight.option, decode=target)
        self.decodes[target].take_over(flight, num_generated)
        if source != flight.option.fetch_from:
            flight.with_replicas.discard(source)
            self._done_with(source)

    def _choose(
        self, request: TraceRequest, hashes: list[bytes], prefill_names: list[str], decode_names: list[str]
    ) -> tuple[Option, float]:
        demand = RoutingRequest(
            num_tokens=request.num_tokens,
            cache=self._wire_cache,
            max_local_tokens=self._setup.max_local_tokens,
        )
        cached, stored = self._indexes.depths(hashes, {*self.prefills, *self.decodes})
        prefills = [self._view(name, self.prefills[name], cached, stored) for name in prefill_names]
        decodes = [self._view(name, self.decodes[name], cached, stored) for name in decode_names]
        option = self._policy.options(demand, prefills, decodes)[0]
        # Computed here, because baseline policies predict no compute time, and queues would stay empty.
        view = next(view for view in (*prefills, *decodes) if view.replica == (option.prefill or option.decode))
        return option, view.compute_s(demand, max(view.cached_tokens, option.fetch_tokens))

    def _view(
        self,
        name: str,
        replica: PrefillReplica | DecodeReplica,
        cached: Mapping[str, Depths],
        stored: Mapping[str, Depths],
    ) -> CandidateReplica:
        setup, blocks, held = self._setup, replica.store.blocks, cached.get(name, NOTHING)
        cached_tokens = held.device * setup.block_size
        is_prefill = name in self.prefills
        return CandidateReplica(
            replica=name,
            cached_tokens=cached_tokens,
            stored_tokens=max(cached_tokens, stored.get(name, NOTHING).device * setup.block_size),
            held_tokens=held.blocks * setup.block_size,
            queue_s=max(0.0, self._busy_until.get(name, 0.0) - self._clock.now),
            num_streams=replica.num_streams,
            num_blocks=blocks.num_blocks,
            available_blocks=blocks.num_usable,
            timing=self._prompt_timing(is_prefill=is_prefill),
            max_batch_tokens=setup.prefill_batch_tokens if is_prefill else setup.decode_batch_tokens,
            link_bytes_per_s=self._profile.link.bytes_per_s,
            restore_bytes_per_s=self._profile.host_bytes_per_s if setup.host_tokens else 0.0,
            tokens_per_row=1.0 if isinstance(replica, PrefillReplica) else max(1.0, replica.row_yield.tokens_per_row),
            drafted_per_row=0.0 if isinstance(replica, PrefillReplica) else replica.row_yield.drafted_per_row,
        )

    def _prompt_timing(self, *, is_prefill: bool) -> StepTiming:
        if is_prefill:
            return self._timing[Role.PREFILL]
        return self._decode_timing if self.prefills else self._timing[Role.DECODE]

    # Prefix fetches

    def _fetch(self, flight: Flight, source: str, target: str) -> None:
        """Fetch the prefix to the replica that computes the prompt, then submit the request."""
        size, link = self._setup.block_size, self._profile.link
        depth = flight.option.fetch_tokens // size
        hashes, blocks = flight.hashes[:depth], self._replica(target).store.blocks
        if source == target:
            rate, latency = self._profile.host_bytes_per_s, 0.0
            num_bytes = self._pool_cache.shipped_bytes(depth * size, held=blocks.match(hashes) * size)
        else:
            rate, latency = link.bytes_per_s, link.latency_s
            num_bytes = self._wire_cache.shipped_bytes(depth * size, held=blocks.match_reusable(hashes) * size)
            self._report.fetched_bytes += num_bytes
        arrives = self._pass(source, "host" if source == target else "out", num_bytes, rate)
        self._clock.at(arrives + latency, lambda: self._fetched(flight, source, target, depth))

    def _fetched(self, flight: Flight, source: str, target: str, depth: int) -> None:
        """Store the fetched blocks. Those that the source has evicted since are computed instead."""
        source_store, target_store = self._replica(source).store, self._replica(target).store
        num_held = (source_store if source != target else target_store).num_fetchable(flight.hashes[:depth])
        flight.restored = target_store.restore(flight.hashes[:num_held]) or []
        if source != target:
            source_store.blocks.spare(flight.hashes[:num_held])
        target_store.publish()
        self._submit(flight)

    def _pass(self, replica: str, direction: str, num_bytes: float, rate: float) -> float:
        """Queue bytes on a link. Return the time at which they have passed, after those queued earlier."""
        key = (replica, direction)
        self._link_free_at[key] = max(self._clock.now, self._link_free_at.get(key, 0.0)) + num_bytes / rate
        return self._link_free_at[key]

    # Path of a request

    def _submit(self, flight: Flight) -> None:
        self.decodes[flight.option.decode].submit(flight)

    def _admitted(self, flight: Flight) -> None:
        assert flight.option.prefill
        self.prefills[flight.option.prefill].submit(flight)

    def _prefilled(self, flight: Flight) -> None:
        """Record the first token and ship the rest of the KV.

        Earlier layers were sent while later ones were computed, so only the last layer, or what the link could not
        carry by now, remains.
        """
        option, link = flight.option, self._profile.link
        assert option.prefill
        flight.first_token_at = flight.last_token_at = self._clock.now
        self._answered(option.prefill, flight)
        held = self.decodes[option.decode].held_tokens(flight)
        num_bytes = self._wire_cache.shipped_bytes(flight.request.num_tokens, held=held)
        self._report.shipped_bytes += num_bytes
        hidden = min(flight.compute_s * link.bytes_per_s, num_bytes * (1 - 1 / self._kv.num_layers))
        landed = self._pass(option.prefill, "out", num_bytes - hidden, link.bytes_per_s) + link.latency_s
        self._clock.at(landed, lambda: self._landed(flight))

    def _landed(self, flight: Flight) -> None:
        assert flight.option.prefill
        self.prefills[flight.option.prefill].release(flight)
        self.decodes[flight.option.decode].land(flight)

    def _answered(self, replica: str, flight: Flight) -> None:
        """Record that a replica has computed a prompt. After its last one, its predicted backlog is reset."""
        self._indexes.settle(replica, flight.hashes, num_tokens=flight.request.num_tokens)
        self._unanswered[replica] -= 1
        if not self._unanswered[replica]:
            self._busy_until[replica] = 0.0
        self._look_for_room()

    def _replica(self, name: str) -> PrefillReplica | DecodeReplica:
        return self.prefills.get(name) or self.decodes[name]

    def _store(self, name: str, max_batch_tokens: int) -> Store:
        setup, size = self._setup, self._setup.block_size
        return Store(
            name,
            self._clock,
            cache=self._pool_cache,
            sizes=self._kv.pool_sizes(setup.kv_tokens, block_size=size, max_batch_tokens=max_batch_tokens),
            max_batch_tokens=max_batch_tokens,
            checkpoint_tokens=setup.checkpoint_tokens,
            num_host_blocks=setup.host_tokens // setup.block_size,
            eviction=setup.eviction,
            indexes=self._indexes,
        )

    def _prefill(self, name: str) -> PrefillReplica:
        store = self._store(name, self._setup.prefill_batch_tokens)
        return PrefillReplica(
            store,
            self._clock,
            self._timing[Role.PREFILL],
            block_size=self._setup.block_size,
            max_batch_tokens=self._setup.prefill_batch_tokens,
            max_running=store.max_running(self._setup.max_running),
            finished=self._prefilled,
            cores=self._cores,
            width=self._setup.prefill_width,
        )

    def _decode(self, name: str) -> DecodeReplica:
        store = self._store(name, self._setup.decode_batch_tokens)
        return DecodeReplica(
            store,
            self._clock,
            self._timing[Role.DECODE],
            self._decode_timing,
            block_size=self._setup.block_size,
            max_batch_tokens=self._setup.decode_batch_tokens,
            max_running=store.max_running(self._setup.max_running),
            admitted=self._admitted,
            reserved=self._copy,
            prefilled=lambda flight: self._answered(name, flight),
            gaps=self._report.gap,
            ended=self._ended,
            cores=self._cores,
            width=self._setup.decode_width,
            drafts=self._drafts_of(name),
        )

    def _drafts_of(self, name: str) -> SimulatedDrafts | None:
        """Create the drafts of a replica. The seed differs per replica but is the same in every run."""
        rates = self._profile.draft_rates
        if rates is None:
            return None
        drafts = self.drafts[name] = SimulatedDrafts(rates, self._decode_timing, seed=len(self.drafts))
        return drafts
