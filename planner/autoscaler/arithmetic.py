"""Number of replicas that a load keeps busy, computed without queues, caches or randomness.

It gives the search a starting point and ranks sizes by their spare capacity. The simulator decides what is enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from core.trace.trace import TraceRequest
from planner.autoscaler.demand import Demand
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.profile import Profile


def demand_of(
    trace: Sequence[TraceRequest], setup: FleetSetup, profile: Profile, *, slo_itl_s: float, reuse_share: float
) -> Demand:
    """Compute the demand of a trace of at least two requests. reuse_share: share of prompt tokens found in caches."""
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
    """Return the token rate of one replica with the largest batch that keeps the ITL limit and fits its memory."""
    timing = profile.decode_timing
    row_s = max(timing.token_s + timing.context_s * mean_context, 1e-9)
    rows = min((slo_itl_s - timing.base_s) / row_s, setup.max_running, setup.kv_tokens / mean_context)
    if (kv := profile.kv).window or kv.state_bytes:
        size, largest, context = setup.block_size, setup.decode_batch_tokens, math.ceil(mean_context)
        pool = kv.pool_sizes(setup.kv_tokens, block_size=size, max_batch_tokens=largest)
        rows = min(rows, pool.max_batch(kv.wire_cache(size), context, max_batch_tokens=largest))
    rows = max(rows, 1.0)
    return rows / (timing.base_s + rows * row_s)
