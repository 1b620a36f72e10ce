"""What would have come of the autoscaler, in virtual time: of a spec, a profile and a trace; and every fixed split."""

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

_BLOCK = 64  # tokens; smaller where the trace's own blocks are


def rules_of(spec: Spec, **changes: Any) -> AutoscaleSpec:
    """Those of the spec, or of a plain topology: as many devices as it has, in any split."""
    rules = spec.autoscale
    if rules is None:
        devices = devices_of(spec)
        there_are = spec.prefill.replicas * devices.prefill + spec.decode.replicas * devices.decode
        most = changes.get("max_devices", there_are)
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
    """scaled: of the autoscaler; fixed: of each fixed split by its name, where that is asked for."""
    fleets = Fleets.of(spec, rules, profile, block_size=min(_BLOCK, trace[0].tokens_per_id))
    limits = ScaleLimits.of(rules, devices=devices_of(spec))
    begin = PoolSizes(spec.prefill.replicas, spec.decode.replicas)
    if not begin.decode or not begin.prefill:
        raise SpecError(f"{spec.topology}: the autoscaler needs a replica in each pool to begin with")
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
