"""Replay of a trace with the autoscaler on a simulated deployment, for `cluster autoscale replay`.

It runs in virtual time, by the same rules as live.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest
from core.types.request import Role
from planner.autoscaler.decide import Autoscaler, AutoscaleState
from planner.autoscaler.observation import ChangePrice, Observation, Saturation
from planner.autoscaler.pool_sizes import PoolSizes, ScaleMoves
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import Fleets, SimulatedOutlook
from planner.simulator.clock import Clock
from planner.simulator.fleet import Fleet
from planner.simulator.flight import Flight
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.report import Report
from planner.simulator.run import feed

WINDOW_S = 180.0  # traffic that a decision is based on
PAST_S = 900.0  # traffic before the window, whose prompts are assumed to be cached
_LOOK_S = 1.0  # interval between checks for another serving replica
_FIRST_DRAIN_S = 5.0  # assumed duration of a drain before one is measured


@dataclass(frozen=True, kw_only=True)
class ReplayPrice:
    """Durations of simulated changes in seconds. Drains are simulated and need no figure."""

    start_s: float = 60.0
    switch_s: float | None = 2.0


class ScaledReplay:
    """Replay of one trace with one autoscaler. `run` may be called once."""

    def __init__(
        self,
        fleets: Fleets,
        trace: Sequence[TraceRequest],
        autoscaler: Autoscaler,
        *,
        begin: PoolSizes,
        price: ReplayPrice,
        decided: Callable[[ScalingDecision], None] = lambda decision: None,
    ) -> None:
        """begin: sizes before the first decision. decided: called with each decision."""
        self.decisions: list[ScalingDecision] = []
        self._fleets = fleets
        self._trace = trace
        self._autoscaler = autoscaler
        self._price = price
        self._decided = decided
        self._state = AutoscaleState()
        self._sizes = begin
        self._clock = Clock()
        self._report = Report(slo_ttft_s=fleets.slo_ttft_s, slo_itl_s=fleets.slo_itl_s)
        setup = replace(fleets.setup, num_prefill=begin.prefill, num_decode=begin.decode)
        hashes = PrefixHashes.of_trace(trace, setup.block_size, has_states=fleets.profile.kv.state_bytes > 0)
        self._fleet = Fleet(setup, fleets.profile, hashes, self._clock, self._report)
        self._seen: list[SeenRequest] = []
        self._flights: dict[int, Flight] = {}  # flights that _seen does not record as ended
        self._num_changing = 0
        self._drains = [_FIRST_DRAIN_S]
        self._replica_s = 0.0
        self._held_since = 0.0

    def run(self) -> dict[str, Any]:
        """Run the replay and return the simulator's report, with decisions, changes, changes_per_hour, mean_replicas,
        and good (the number of requests that kept both limits)."""
        begin = time.perf_counter()
        was_enabled = gc.isenabled()
        gc.disable()  # as in simulate
        try:
            feed(self._clock, self._arrive, self._trace)
            self._clock.at(self._autoscaler.spec.interval_s, self._decide)
            self._clock.run()
        finally:
            if was_enabled:
                gc.enable()
        return self._summary() | {"wall_s": time.perf_counter() - begin}

    def _arrive(self, request: TraceRequest) -> None:
        self._seen.append(
            SeenRequest(
                arrival_s=request.arrival_s,
                num_tokens=request.num_tokens,
                ids=request.ids,
                tokens_per_id=request.tokens_per_id,
            )
        )
        self._flights[request.number] = self._fleet.arrive(request)

    def _decide(self) -> None:
        now, spec = self._clock.now, self._autoscaler.spec
        self._see_ended()
        first = bisect_left(self._seen, now - WINDOW_S - PAST_S, key=lambda seen: seen.arrival_s)
        requests = self._seen[first:]
        seen = Observation(
            now_s=now,
            sizes=self._sizes,
            requests=requests,
            saturation=self._saturation(requests[-200:]),
            price=self._prices(),
            is_changing=self._num_changing > 0,
        )
        begin = time.perf_counter()
        self._state, decision = self._autoscaler.decide(
            self._state,
            seen,
            lambda: SimulatedOutlook.of(
                self._fleets, requests, now_s=now, window_s=WINDOW_S, ahead_s=2 * spec.interval_s
            ),
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
        moves: ScaleMoves = decision.moves
        for count, old, new in (
            (moves.to_decode, Role.PREFILL, Role.DECODE),
            (moves.to_prefill, Role.DECODE, Role.PREFILL),
        ):
            for _ in range(count):
                self._retire(old, lambda new=new: self._begin(new, after_s=self._price.switch_s or 0.0))  # type: ignore[misc]
        for count, role in ((moves.start_prefill, Role.PREFILL), (moves.start_decode, Role.DECODE)):
            for _ in range(count):
                self._num_changing += 1
                self._begin(role, after_s=self._price.start_s)
        for count, role in ((moves.stop_prefill, Role.PREFILL), (moves.stop_decode, Role.DECODE)):
            for _ in range(count):
                self._retire(role, self._changed)

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
            then()

        self._fleet.retire(role, gone)

    def _begin(self, role: Role, *, after_s: float) -> None:
        def serve() -> None:
            self._fleet.add(role)
            self._changed()

        self._clock.at(self._clock.now + after_s, serve)

    def _changed(self) -> None:
        self._num_changing -= 1

    def _prices(self) -> ChangePrice:
        return ChangePrice(
            start_prefill_s=self._price.start_s,
            start_decode_s=self._price.start_s,
            drain_s=fmean(self._drains[-20:]),
            switch_s=self._price.switch_s,
        )

    def _see_ended(self) -> None:
        """Update the observed requests with first tokens and ends since the last decision."""
        for number, flight in list(self._flights.items()):
            seen = self._seen[number]
            if flight.first_token_at:
                seen.ttft_s = flight.ttft_s
            if flight.ended_at:
                seen.num_output, seen.itl_s = flight.request.num_output, flight.mean_itl_s or None
                del self._flights[number]

    def _saturation(self, last: Sequence[SeenRequest]) -> Saturation:
        prefill = self._fleet.loads(Role.PREFILL)
        decode = self._fleet.loads(Role.DECODE)
        itl = [seen.itl_s for seen in last if seen.itl_s]
        return Saturation(
            prefill=fmean(use.queue_s for use in prefill) / self._fleets.slo_ttft_s,
            decode=max(
                fmean(use.kv_share for use in decode),
                fmean(use.num_streams for use in decode) / self._fleets.setup.max_running,
                fmean(itl) / self._fleets.slo_itl_s if itl else 0.0,
            ),
        )

    def _hold(self, sizes: PoolSizes) -> None:
        self._replica_s += sum(self._sizes) * (self._clock.now - self._held_since)
        self._sizes, self._held_since = sizes, self._clock.now

    def _summary(self) -> dict[str, Any]:
        end_s = self._trace[-1].arrival_s
        replica_s = self._replica_s + sum(self._sizes) * max(0.0, end_s - self._held_since)
        changes = [decision for decision in self.decisions if decision.is_change]
        summary = self._report.summary()
        return summary | {
            "good": round(summary["good_share"] * summary["completed"]),
            "decisions": [decision.as_dict() for decision in self.decisions],
            "trace_s": end_s,
            "changes": len(changes),
            "changes_per_hour": len(changes) / max(end_s, 1e-9) * 3600,
            "mean_replicas": replica_s / max(end_s, 1e-9),
        }
