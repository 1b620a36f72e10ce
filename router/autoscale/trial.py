"""What would have come of the autoscaler, in virtual time: of a spec, a profile and a trace; and every fixed split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cluster.bench.trace import TraceRequest
from cluster.words.errors import SpecError
from cluster.words.spec import AutoscaleSpec, PoolBounds, Spec
from router.autoscale.decide import Autoscaler
from router.autoscale.live_fleets import devices_of
from router.autoscale.pool_sizes import PoolSizes, ScaleLimits
from router.autoscale.replay import ReplayPrice, ScaledReplay
from router.autoscale.scaling_decision import ScalingDecision
from router.autoscale.simulated_outlook import Fleets
from router.simulator.fleet_setup import FleetSetup
from router.simulator.profile import Profile
from router.simulator.run import simulate

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
    fleets = fleets_for(spec, rules, profile, tokens_per_id=trace[0].tokens_per_id)
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
    for sizes in splits(limits) if has_fixed else ():
        setup = replace(fleets.setup, num_prefill=sizes.prefill, num_decode=sizes.decode)
        fixed[str(sizes)] = simulate(setup, profile, trace, slo_ttft_s=fleets.slo_ttft_s, slo_itl_s=fleets.slo_itl_s)
        said(f"{sizes}: {fixed[str(sizes)]['good_share']:.1%} good")
    return {"scaled": scaled, "fixed": fixed}


def fleets_for(spec: Spec, rules: AutoscaleSpec, profile: Profile, *, tokens_per_id: int) -> Fleets:
    setup = FleetSetup(
        num_prefill=1,
        num_decode=1,
        policy="cost",
        block_size=min(_BLOCK, tokens_per_id),
        kv_tokens=profile.kv.pool_tokens,
        pulls=True,
        prefill_batch_tokens=spec.prefill.max_batch_tokens,
        decode_batch_tokens=spec.decode.max_batch_tokens,
        max_running=spec.decode.max_running,
        max_local_tokens=spec.router.max_local_prefill,
    )
    return Fleets(setup=setup, profile=profile, slo_ttft_s=rules.slo_ttft_ms / 1e3, slo_itl_s=rules.slo_itl_ms / 1e3)


def splits(limits: ScaleLimits) -> list[PoolSizes]:
    """Of all devices that there may be, to each number of prefill replicas."""
    found = []
    for num_prefill in range(limits.least.prefill, limits.most.prefill + 1):
        left = limits.max_devices - num_prefill * limits.devices.prefill
        sizes = PoolSizes(num_prefill, min(left // limits.devices.decode, limits.most.decode))
        if limits.allow(sizes):
            found.append(sizes)
    return found
