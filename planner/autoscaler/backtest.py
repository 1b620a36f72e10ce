"""Backtest of the autoscaler on a trace in virtual time, compared with every fixed split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core.spec.schema import AutoscaleSpec, PoolBounds, Spec
from core.trace.trace import TraceRequest
from core.types.errors import SpecError
from planner.autoscaler.decide import Autoscaler
from planner.autoscaler.live_fleets import devices_of
from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits
from planner.autoscaler.replay import ReplayPrice, ScaledReplay
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import Fleets
from planner.simulator.profile import Profile
from planner.simulator.run import simulate

_BLOCK = 64  # tokens; the trace's block size if that is smaller


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
    limits = ScaleLimits.of(rules, devices=devices_of(spec))
    begin = PoolSizes(spec.prefill.replicas, spec.decode.replicas)
    if not begin.decode or not begin.prefill:
        raise SpecError(f"{spec.topology}: the autoscaler needs at least one replica in each pool at the start")
    scaled = ScaledReplay(
        fleets,
        trace,
        Autoscaler(rules, limits),
        begin=begin,
        price=ReplayPrice(start_s=start_s, switch_s=switch_s),
        decided=decided,
    ).run()
    fixed = {}
    for sizes in limits.splits() if has_fixed else ():
        setup = replace(fleets.setup, num_prefill=sizes.prefill, num_decode=sizes.decode)
        fixed[str(sizes)] = simulate(setup, profile, trace, slo_ttft_s=fleets.slo_ttft_s, slo_itl_s=fleets.slo_itl_s)
        said(f"{sizes}: {fixed[str(sizes)]['good_share']:.1%} good")
    return {"scaled": scaled, "fixed": fixed}
