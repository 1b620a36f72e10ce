"""Simulation of a trace, from its requests to the report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from core.trace.trace import TraceRequest
from planner.simulator.clock import Clock
from planner.simulator.fleet import Fleet
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.prefix_hashes import PrefixHashes
from planner.simulator.profile import Profile
from planner.simulator.report import Report


def simulate(
    setup: FleetSetup,
    profile: Profile,
    trace: Sequence[TraceRequest],
    *,
    slo_ttft_s: float | None = None,
    slo_itl_s: float | None = None,
) -> dict[str, Any]:
    """Simulate `trace` and return plain values, as printed by `cluster simulate --json`.

    The result is exactly reproducible except for wall_s and decision_us, which are real time.
    """
    begin = time.perf_counter()
    clock = Clock()
    report = Report(slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)
    hashes = PrefixHashes.of_trace(trace, setup.block_size, has_states=profile.kv.state_bytes > 0)
    fleet = Fleet(setup, profile, hashes, clock, report)
    was_enabled = gc.isenabled()
    gc.disable()  # the collector would free nothing, but traverse millions of hashes repeatedly
    try:
        feed(clock, fleet.arrive, trace)
        clock.run()
    finally:
        if was_enabled:
            gc.enable()
    summary = report.summary()
    summary["utilisation"], summary["imbalance"] = _load(fleet, summary["duration_s"])
    summary["preemptions"] = sum(replica.num_preemptions for replica in fleet.decodes.values())
    if fleet.drafts:
        summary["drafts"] = _drafts(fleet)
    return summary | {"wall_s": time.perf_counter() - begin}


def feed(clock: Clock, take: Callable[[TraceRequest], object], trace: Sequence[TraceRequest]) -> None:
    """Schedule the arrivals one at a time, so the clock never holds more than the next one."""
    arrivals = iter(trace)

    def arrive(request: TraceRequest) -> None:
        following = next(arrivals, None)
        if following:
            clock.at(following.arrival_s, lambda: arrive(following))
        take(request)

    first = next(arrivals)
    clock.at(first.arrival_s, lambda: arrive(first))


def _drafts(fleet: Fleet) -> dict[str, float]:
    """Return the drafted and accepted tokens, and the mean number of tokens per row and step."""
    yields = [replica.row_yield.tokens_per_row for replica in fleet.decodes.values()]
    busy = [tokens for tokens in yields if tokens]
    return {
        "drafted": sum(drafts.num_drafted for drafts in fleet.drafts.values()),
        "accepted": sum(drafts.num_accepted for drafts in fleet.drafts.values()),
        "tokens_per_row": sum(busy) / len(busy) if busy else 0.0,
    }


def _load(fleet: Fleet, duration_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by pool, the mean utilization and the imbalance (busiest replica / mean)."""
    utilisation, imbalance = {}, {}
    for pool, replicas in (("prefill", fleet.prefills), ("decode", fleet.decodes)):
        busy = [replica.busy_s for replica in replicas.values()]
        if busy and sum(busy):
            utilisation[pool] = sum(busy) / len(busy) / duration_s
            imbalance[pool] = max(busy) * len(busy) / sum(busy)
    return utilisation, imbalance
