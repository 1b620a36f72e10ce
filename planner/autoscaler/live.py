"""Scaling decisions and predictions for a live deployment, simulated at the rates that its replicas have measured.

Decisions run in a separate process, because the simulator computes for seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.trace import TraceRequest
from core.trace.traffic import TOKENS_PER_HASH, ReplicaReport, Slo
from core.types.errors import ClusterError
from core.types.request import Role
from core.types.step_timing import StepTiming
from planner.autoscaler.decide import Autoscaler, AutoscaleState, Decided
from planner.autoscaler.observation import LiveObservation, Observation, Saturation
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import Fleets, SimulatedOutlook
from planner.simulator.drafts import by_yield
from planner.simulator.profile import KV, Drafts, LinkProfile, Profile, Steps
from planner.simulator.run import simulate

_LINK_BYTES_PER_S = 1e9  # default before a rate is measured
_LATENCY_S = 0.003
_NUM_LAYERS = 32  # all layers of a transfer but the last overlap with the prefill
_HOST_BYTES_PER_S = 4e9


def decide_live(state: AutoscaleState, sight: LiveObservation) -> Decided:
    """Decide on the sizes of a live deployment. Pure, apart from the clock for `took_s`."""
    begin = time.perf_counter()
    spec, rules = sight.spec, sight.spec.autoscale
    assert rules
    seen = Observation(
        now_s=sight.now_s,
        sizes=PoolSizes(spec.prefill.replicas, spec.decode.replicas),
        requests=sight.requests,
        saturation=saturation_of(sight.replicas, rules, num_waiting=sight.num_waiting),
        price=sight.price,
        is_changing=sight.is_changing,
    )
    try:
        fleets = fleets_of(spec, rules, sight.replicas)
    except ClusterError as error:
        return state, ScalingDecision(
            number=state.number,
            time_s=sight.time_s,
            before=seen.sizes,
            after=seen.sizes,
            mode="waiting",
            reason=str(error),
            is_dry_run=rules.dry_run,
        )
    new_state, decision = Autoscaler(rules, devices=devices_of(spec)).decide(
        state,
        seen,
        lambda: SimulatedOutlook.of(fleets, sight.requests, now_s=sight.now_s, ahead_s=2 * rules.interval_s),
    )
    return new_state, replace(decision, time_s=sight.time_s, took_s=time.perf_counter() - begin)


def predict_load(
    spec: Spec, replicas: Sequence[ReplicaReport], trace: Sequence[TraceRequest], slo: Slo
) -> dict[str, Any]:
    """Simulate the trace on these replicas, starting with empty caches, and return the simulator's report.

    Raises ClusterError while rates are unknown.
    """
    fleets = fleets_of(spec, AutoscaleSpec(), replicas)  # the autoscale limits are not used
    setup = replace(fleets.setup, block_size=math.gcd(spec.kv.block_size, trace[0].tokens_per_id))
    return simulate(setup, fleets.profile, trace, slo)


def fleets_of(spec: Spec, rules: AutoscaleSpec, replicas: Sequence[ReplicaReport]) -> Fleets:
    """Build the simulator's model from the replicas' reports. Raises ClusterError while rates are unknown."""
    if not replicas:
        raise ClusterError("no router has reported its replicas yet; routers report every few seconds")
    steps = {role: _mean_timing(role, replicas) for role in Role}
    rates = [replica.link_bytes_per_s for replica in replicas if replica.link_bytes_per_s]
    pools = [replica.num_blocks * replica.block_size for replica in replicas]
    cache = max((replica.cache for replica in replicas), key=lambda cache: cache.token_bytes)
    profile = Profile(
        name="live",
        origin="measured",
        derivation=["step times measured by the replicas themselves, including other load on their machines"],
        steps=Steps(**asdict(steps[Role.PREFILL]) | {"context_s": steps[Role.DECODE].context_s}),
        decode_steps=Steps(**asdict(steps[Role.DECODE])),
        drafts=_drafts(replicas),
        kv=KV(
            bytes_per_token=cache.token_bytes,
            wire_bytes_per_token=cache.token_bytes,
            num_layers=_NUM_LAYERS,
            pool_tokens=round(fmean(pools)),
            window=cache.window,
            window_wire_bytes_per_token=cache.window_token_bytes,
            pool_window_tokens=round(fmean(max(0, one.num_window_parts - 1) * one.block_size for one in replicas)),
            state_bytes=cache.state_bytes,
            pool_states=round(fmean(replica.num_states for replica in replicas)),
        ),
        link=LinkProfile(latency_s=_LATENCY_S, bytes_per_s=fmean(rates) if rates else _LINK_BYTES_PER_S),
        host_bytes_per_s=_HOST_BYTES_PER_S,
        usd_per_hour=1.0,
    )
    return Fleets.of(spec, rules, profile, block_size=TOKENS_PER_HASH)


def saturation_of(replicas: Sequence[ReplicaReport], rules: AutoscaleSpec, *, num_waiting: int) -> Saturation:
    """Compute the saturation of each pool. num_waiting: requests queued in routers; if any, the fuller pool is at 1."""
    prefill = [r for r in replicas if r.role is Role.PREFILL and r.prefill_tokens_per_s > 0]
    decode = [r for r in replicas if r.role is Role.DECODE]
    slo = Slo.of_ms(rules.slo_ttft_ms, rules.slo_itl_ms)
    full_p = full_d = 0.0
    if prefill:
        full_p = fmean(r.queued_tokens / r.prefill_tokens_per_s for r in prefill) / slo.ttft_s
    if decode:
        full_d = max(
            fmean(1 - r.available_blocks / r.num_blocks for r in decode),
            fmean(r.num_streams / r.max_running for r in decode),
            fmean(r.decode_step_s / max(1.0, r.tokens_per_row) for r in decode) / slo.itl_s,
        )
    if num_waiting and full_p >= full_d:
        full_p = max(full_p, 1.0)
    elif num_waiting:
        full_d = max(full_d, 1.0)
    return Saturation(prefill=full_p, decode=full_d)


def devices_of(spec: Spec) -> PoolSizes:
    """Return the number of GPUs per replica of each pool, or of ranks without GPUs."""
    of = {role: spec.pool(role) for role in Role}
    return PoolSizes(*(round(of[role].tensor_parallel * max(1.0, of[role].resources.gpus)) for role in Role))


def _mean_timing(role: Role, replicas: Sequence[ReplicaReport]) -> StepTiming:
    if not any(replica.role is role for replica in replicas):  # replicas of the other role do both
        role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    known = [replica.timing for replica in replicas if replica.role is role and replica.timing]
    if not known:
        raise ClusterError(f"no {role} replica has reported step times yet")
    return StepTiming(**{name: fmean(getattr(timing, name) for timing in known) for name in Steps.model_fields})


def _drafts(replicas: Sequence[ReplicaReport]) -> Drafts | None:
    """Return draft rates from the recent yields of the decode replicas; None if they do not draft."""
    busy = [replica for replica in replicas if replica.role is Role.DECODE and replica.tokens_per_row]
    if not busy:
        return None
    return by_yield(fmean(r.tokens_per_row for r in busy), fmean(r.drafted_per_row for r in busy))
