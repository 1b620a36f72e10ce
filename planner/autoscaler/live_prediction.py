"""Simulation of a load on a live deployment, at the rates that its replicas have measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.spec.schema import AutoscaleSpec, Spec
from core.trace.trace import TraceRequest
from core.trace.traffic import ReplicaReport
from planner.autoscaler.live_fleets import fleets_of
from planner.simulator.run import simulate


def predict_load(
    spec: Spec,
    replicas: Sequence[ReplicaReport],
    trace: Sequence[TraceRequest],
    *,
    slo_ttft_s: float | None,
    slo_itl_s: float | None,
) -> dict[str, Any]:
    """Simulate the trace on as many replicas, with empty caches at the start, and return the simulator's report.

    Raises ClusterError while rates are unknown.
    """
    fleets = fleets_of(spec, AutoscaleSpec(), replicas)  # the autoscale limits are not used
    setup = replace(
        fleets.setup,
        num_prefill=spec.prefill.replicas,
        num_decode=spec.decode.replicas,
        block_size=math.gcd(spec.kv.block_size, trace[0].tokens_per_id),
    )
    return simulate(setup, fleets.profile, trace, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)
