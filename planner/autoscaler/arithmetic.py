"""How many replicas a load keeps busy, by arithmetic: no queue, no cache, no chance. Where the search begins, and what
tells which of two sizes has more to spare; what is enough the simulator says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from core.trace.trace import TraceRequest
from planner.autoscaler.demand import Demand
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.profile import Profile


def demand_of(
    trace: Sequence[TraceRequest], setup: FleetSetup, profile: Profile, *, slo_itl_s: float, reuse_share: float
) -> Demand:
    """Of a trace of at least two requests. reuse_share: of prompt tokens that need not be computed."""
    seconds = max(trace[-1].arrival_s, 1e-9)
    computed = sum(
        profile.timing.prefill_s(
            max(1, round(request.num_tokens * (1 - reuse_share))),
            after=round(request.num_tokens * reuse_share),
            chunk=setup.prefill_batch_tokens,
        )
        for request in trace
    )
    mean_context = fmean(request.num_tokens + request.num_output / 2 for request in trace)
    tokens_per_s = sum(request.num_output for request in trace) / seconds
    return Demand(
        prefill=computed / seconds,
        decode=tokens_per_s / _decode_tokens_per_s(setup, profile, mean_context, slo_itl_s=slo_itl_s),
    )


def _decode_tokens_per_s(setup: FleetSetup, profile: Profile, mean_context: float, *, slo_itl_s: float) -> float:
    """Of one replica, with as many rows in a step as keep the limit, and as it has room for."""
    timing = profile.decode_timing
    row_s = max(timing.token_s + timing.context_s * mean_context, 1e-9)
    rows = min((slo_itl_s - timing.base_s) / row_s, setup.max_running, setup.kv_tokens / mean_context)
    rows = max(rows, 1.0)
    return rows / (timing.base_s + rows * row_s)
