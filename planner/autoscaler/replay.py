"""Replay of a trace with the autoscaler on a simulated deployment, for `cluster autoscale replay`.

The replay runs in virtual time with the live rules. It is compared with every fixed split of the devices.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from core.spec.schema import AutoscaleSpec, PoolBounds, Spec
from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest
from core.types.errors import SpecError
from core.types.request import Role
from planner.autoscaler.decide import Autoscaler, AutoscaleState
from planner.autoscaler.live import devices_of
from planner.autoscaler.observation import ChangePrice, Observation, Saturation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import WINDOW_S, Fleets, SimulatedOutlook
from planner.simulator.fleet import Fleet
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import Profile
from planner.simulator.replica import Flight
from planner.simulator.run import summary

_PAST_S = 900.0  # traffic before the window, whose prompts are assumed to be cached
_BLOCK = 64  # tokens; the trace's block size if that is smaller
_LOOK_S = 1.0  # interval between checks for another serving replica
_FIRST_DRAIN_S = 5.0  # assumed duration of a drain before one is measured


def replay_trace(
    spec: Spec,
    rules: AutoscaleSpec,
    profile: Profile,
    trace: Sequence[TraceRequest],
    *,
    start_s: float,
    switch_s: float | None,
    has_fixed: bool,
    decided: Callable[[ScalingDecision], None],
    said: Callable[[str], None],
) -> dict[str, Any]:
    """Replay the trace. Return the reports `scaled` (with the autoscaler) and `fixed` (by split, if has_fixed).

    start_s, switch_s: simulated duration of a replica's start and of a role switch; switch_s None: no switches.
    decided: called with each decision. said: called with a progress line for each fixed split.
    Raises SpecError for a topology without a replica in each pool.
    """
    fleets = Fleets.of(spec, rules, profile, block_size=min(_BLOCK, trace[0].tokens_per_id))
    autoscaler = Autoscaler(rules, devices=devices_of(spec))
    begin = PoolSizes(spec.prefill.replicas, spec.decode.replicas)
    if not begin.decode or not begin.prefill:
        raise SpecError(f"{spec.topology}: the autoscaler needs at least one replica in each pool at the start")
    replay = ScaledReplay(fleets, trace, autoscaler, begin=begin, start_s=start_s, switch_s=switch_s, decided=decided)
    scaled = replay.run()
    fixed = {}
    for sizes in autoscaler.limits.splits() if has_fixed else ():
        fixed[str(sizes)] = fleets.simulate(sizes, trace)
        said(f"{sizes}: {fixed[str(sizes)]['good_share']:.1%} good")
    return {"scaled": scaled, "fixed": fixed}


def rules_of(spec: Spec, **changes: Any) -> AutoscaleSpec:
    """Return the spec's autoscaling rules with these changes.

    A spec without rules gets bounds that allow any split of its devices.
    """
    rules = spec.autoscale
    if rules is None:
        devices = devices_of(spec)
        num_devices = spec.prefill.replicas * devices.prefill + spec.decode.replicas * devices.decode
        most = changes.get("max_devices", num_devices)
        bounds = PoolBounds(min=1, max=max(1, most - 1))
        rules = AutoscaleSpec(prefill=bounds, decode=bounds, max_devices=most)
    return AutoscaleSpec.model_validate(rules.model_dump() | changes)


class ScaledReplay:
    """Replay of one trace with one autoscaler. `run` may be called once."""

    def __init__(
        self,
        fleets: Fleets,
        trace: Sequence[TraceRequest],
        autoscaler: Autoscaler,
        *,
        begin: PoolSizes,
        start_s: float = 60.0,
        switch_s: float | None = 2.0,
        decided: Callable[[ScalingDecision], None] = lambda decision: None,
    ) -> None:
        """begin: sizes before the first decision. start_s, switch_s: as in `replay_trace`. decided: called with each
        decision."""
        self.decisions: list[ScalingDecision] = []
        self._fleets = fleets
        self._trace = trace
        self._autoscaler = autoscaler
        self._start_s = start_s
        self._switch_s = switch_s
        self._decided = decided
        self._state = AutoscaleState()
        self._sizes = begin
        setup, profile = fleets.with_sizes(begin), fleets.profile
        hashes = PrefixHashes.of_trace(trace, setup.block_size, has_states=profile.kv.state_bytes > 0)
        self._fleet = Fleet(setup, profile, hashes)
        self._clock = self._fleet.clock
        self._num_changing = 0
        self._drains = [_FIRST_DRAIN_S]
        self._replica_s = 0.0
        self._held_since = 0.0

    def run(self) -> dict[str, Any]:
        """Run the replay and return the simulator's report, with decisions, changes, changes_per_hour, mean_replicas,
        and good (the number of requests that kept both limits)."""
        begin = time.perf_counter()
        self._clock.at(self._autoscaler.spec.interval_s, self._decide)
        self._fleet.run(self._trace)
        return self._summary() | {"wall_s": time.perf_counter() - begin}

    def _decide(self) -> None:
        now, spec = self._clock.now, self._autoscaler.spec
        flights, first_s = self._fleet.flights, now - WINDOW_S - _PAST_S
        requests = list(map(_seen, flights[bisect_left(flights, first_s, key=lambda one: one.request.arrival_s) :]))
        seen = Observation(
            now_s=now,
            sizes=self._sizes,
            requests=requests,
            saturation=self._saturation(requests[-200:]),
            price=ChangePrice(
                start_prefill_s=self._start_s,
                start_decode_s=self._start_s,
                drain_s=fmean(self._drains[-20:]),
                switch_s=self._switch_s,
            ),
            is_changing=self._num_changing > 0,
        )
        begin = time.perf_counter()
        self._state, decision = self._autoscaler.decide(
            self._state,
            seen,
            lambda: SimulatedOutlook.of(self._fleets, requests, now_s=now, ahead_s=2 * spec.interval_s),
        )
        gc.collect()  # a simulated fleet consists of reference cycles
        decision = replace(decision, took_s=time.perf_counter() - begin)
        self.decisions.append(decision)
        self._decided(decision)
        if decision.is_change and not spec.dry_run:
            self._carry_out(decision)
        if now + spec.interval_s <= self._trace[-1].arrival_s:
            self._clock.at(now + spec.interval_s, self._decide)

    def _carry_out(self, decision: ScalingDecision) -> None:
        self._hold(decision.after)
        moves = decision.moves
        for _ in range(moves.to_decode):
            self._retire(Role.PREFILL, lambda: self._begin(Role.DECODE, after_s=self._switch_s or 0.0))
        for _ in range(moves.to_prefill):
            self._retire(Role.DECODE, lambda: self._begin(Role.PREFILL, after_s=self._switch_s or 0.0))
        for role, num_starts, num_stops in (
            (Role.PREFILL, moves.start_prefill, moves.stop_prefill),
            (Role.DECODE, moves.start_decode, moves.stop_decode),
        ):
            for _ in range(num_starts):
                self._begin(role, after_s=self._start_s)
            for _ in range(num_stops):
                self._retire(role, lambda: None)

    def _retire(self, role: Role, then: Callable[[], None]) -> None:
        self._num_changing += 1
        self._retire_one(role, then)

    def _retire_one(self, role: Role, then: Callable[[], None]) -> None:
        begin_s = self._clock.now
        if len(self._fleet.serving(role)) <= 1:  # wait for its replacement to start
            self._clock.at(begin_s + _LOOK_S, lambda: self._retire_one(role, then))
            return

        def gone() -> None:
            self._drains.append(self._clock.now - begin_s)
            self._num_changing -= 1
            then()

        self._fleet.retire(role, gone)

    def _begin(self, role: Role, *, after_s: float) -> None:
        def serve() -> None:
            self._fleet.add(role)
            self._num_changing -= 1

        self._num_changing += 1
        self._clock.at(self._clock.now + after_s, serve)

    def _saturation(self, last: Sequence[SeenRequest]) -> Saturation:
        prefill, decode = self._fleet.prefills.values(), self._fleet.decodes.values()
        itl = [seen.itl_s for seen in last if seen.itl_s]
        return Saturation(
            prefill=fmean(replica.queue_s for replica in prefill) / self._fleets.slo.ttft_s,
            decode=max(
                fmean(replica.kv_share for replica in decode),
                fmean(replica.num_streams for replica in decode) / self._fleets.setup.max_running,
                fmean(itl) / self._fleets.slo.itl_s if itl else 0.0,
            ),
        )

    def _hold(self, sizes: PoolSizes) -> None:
        self._replica_s += sum(self._sizes) * (self._clock.now - self._held_since)
        self._sizes, self._held_since = sizes, self._clock.now

    def _summary(self) -> dict[str, Any]:
        end_s = self._trace[-1].arrival_s
        replica_s = self._replica_s + sum(self._sizes) * max(0.0, end_s - self._held_since)
        changes = [decision for decision in self.decisions if decision.is_change]
        report = summary(self._fleet, self._fleets.slo)
        return report | {
            "good": round(report["good_share"] * report["completed"]),
            "decisions": [decision.as_dict() for decision in self.decisions],
            "trace_s": end_s,
            "changes": len(changes),
            "changes_per_hour": len(changes) / max(end_s, 1e-9) * 3600,
            "mean_replicas": replica_s / max(end_s, 1e-9),
        }


def _seen(flight: Flight) -> SeenRequest:
    """Return what a router has seen of a request so far."""
    request = flight.request
    return SeenRequest(
        arrival_s=request.arrival_s,
        num_tokens=request.num_tokens,
        ids=request.ids,
        tokens_per_id=request.tokens_per_id,
        num_output=request.num_output if flight.ended_at else None,
        ttft_s=flight.ttft_s if flight.first_token_at else None,
        itl_s=flight.mean_itl_s or None if flight.ended_at else None,
    )
