"""Simulation of a trace, from its requests to the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.trace.statistics import spread
from core.trace.trace import TraceRequest
from core.trace.traffic import Slo
from planner.simulator.fleet import Fleet
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import FleetSetup, Profile

_NO_LIMITS = Slo()


def simulate(
    setup: FleetSetup, profile: Profile, trace: Sequence[TraceRequest], slo: Slo = _NO_LIMITS
) -> dict[str, Any]:
    """Simulate `trace` and return plain values, as printed by `cluster simulate --json`.

    The result is exactly reproducible except for wall_s and decision_us, which are real time.
    """
    begin = time.perf_counter()
    fleet = Fleet(setup, profile, PrefixHashes.of_trace(trace, setup.block_size, has_states=profile.kv.state_bytes > 0))
    fleet.run(trace)
    report = summary(fleet, slo)
    report |= {"utilisation": {}, "imbalance": {}}  # imbalance: busiest replica / mean
    for pool, replicas in (("prefill", fleet.prefills), ("decode", fleet.decodes)):
        busy_s = [replica.busy_s for replica in replicas.values()]
        if total_s := sum(busy_s):
            report["utilisation"][pool] = total_s / len(busy_s) / report["duration_s"]
            report["imbalance"][pool] = max(busy_s) * len(busy_s) / total_s
    report["preemptions"] = sum(replica.num_preemptions for replica in fleet.decodes.values())
    if profile.drafts:
        report["drafts"] = _drafts(fleet)
    return report | {"wall_s": time.perf_counter() - begin}


def summary(fleet: Fleet, slo: Slo) -> dict[str, Any]:
    """Summarize the results: times in milliseconds, rates per second of virtual time up to the last token."""
    flights = [flight for flight in fleet.flights if flight.ended_at]
    num_good = sum(slo.is_kept(flight.ttft_s, flight.mean_itl_s) for flight in flights)
    prompt_tokens = sum(flight.request.num_tokens for flight in flights)
    output_tokens = sum(flight.request.num_output for flight in flights)
    duration_s = max((flight.ended_at for flight in flights), default=0.0)
    per_s = 1 / duration_s if duration_s else 0.0
    decision_us = np.asarray(fleet.decision_s) * 1e6
    return {
        "completed": len(flights),
        "refused": fleet.num_refused,
        "duration_s": duration_s,
        "reuse_share": sum(flight.num_cached for flight in flights) / max(1, prompt_tokens),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens * per_s,
        "ttft_ms": spread(np.array([flight.ttft_s for flight in flights]) * 1e3),
        "itl_ms": spread(np.asarray(fleet.gap_s) * 1e3, fleet.gap_counts),
        "e2e_ms": spread(np.array([flight.ended_at - flight.request.arrival_s for flight in flights]) * 1e3),
        "goodput_rps": num_good * per_s,
        "good_share": num_good / max(1, len(flights)),
        "transfer_bytes": fleet.shipped_bytes,
        "pull_bytes": fleet.fetched_bytes,
        "decision_us": {f"p{q}": float(np.percentile(decision_us, q)) if len(decision_us) else 0.0 for q in (50, 95)},
    }


def _drafts(fleet: Fleet) -> dict[str, float]:
    """Return the drafted and accepted tokens, and the mean number of tokens per row and step."""
    drafts = [replica.drafts for replica in fleet.decodes.values() if replica.drafts]
    yields = [replica.row_yield.tokens_per_row for replica in fleet.decodes.values()]
    busy = [tokens for tokens in yields if tokens]
    return {
        "drafted": sum(one.num_drafted for one in drafts),
        "accepted": sum(one.num_accepted for one in drafts),
        "tokens_per_row": sum(busy) / len(busy) if busy else 0.0,
    }
