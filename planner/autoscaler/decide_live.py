"""Scaling decision for a live deployment. Runs in a separate process, because the simulator computes for seconds."""

from __future__ import annotations

import time
from dataclasses import replace

from core.types.errors import ClusterError
from planner.autoscaler.decide import Autoscaler, AutoscaleState
from planner.autoscaler.live_fleets import devices_of, fleets_of, saturation_of
from planner.autoscaler.live_observation import LiveObservation
from planner.autoscaler.observation import Observation
from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits
from planner.autoscaler.replay import WINDOW_S
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import SimulatedOutlook


def decide_live(state: AutoscaleState, sight: LiveObservation) -> tuple[AutoscaleState, ScalingDecision]:
    """Decide on the sizes of a live deployment. Pure, apart from the clock for `took_s`."""
    begin = time.perf_counter()
    rules = sight.spec.autoscale
    assert rules
    seen = Observation(
        now_s=sight.now_s,
        sizes=PoolSizes(sight.spec.prefill.replicas, sight.spec.decode.replicas),
        requests=sight.requests,
        saturation=saturation_of(sight.replicas, rules, num_waiting=sight.num_waiting),
        price=sight.price,
        is_changing=sight.is_changing,
    )
    limits = ScaleLimits.of(rules, devices=devices_of(sight.spec))
    try:
        fleets = fleets_of(sight.spec, rules, sight.replicas)
    except ClusterError as error:
        return state, _undecided(state, sight, seen.sizes, str(error))
    new_state, decision = Autoscaler(rules, limits).decide(
        state,
        seen,
        lambda: SimulatedOutlook.of(
            fleets, sight.requests, now_s=sight.now_s, window_s=WINDOW_S, ahead_s=2 * rules.interval_s
        ),
    )
    return new_state, replace(decision, time_s=sight.time_s, took_s=time.perf_counter() - begin)


def _undecided(state: AutoscaleState, sight: LiveObservation, sizes: PoolSizes, why: str) -> ScalingDecision:
    return ScalingDecision(
        number=state.number,
        time_s=sight.time_s,
        before=sizes,
        after=sizes,
        mode="waiting",
        reason=why,
        is_dry_run=bool(sight.spec.autoscale and sight.spec.autoscale.dry_run),
    )
