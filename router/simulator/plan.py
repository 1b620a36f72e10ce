"""The cheapest xPyD that keeps an SLO on a trace, and the frontier beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.bench.trace import TraceRequest
from cluster.words.errors import SpecError
from router.simulator.fleet_setup import FleetSetup
from router.simulator.profile import Profile
from router.simulator.run import simulate


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One topology, and what the simulator says of it."""

    num_prefill: int
    num_decode: int
    usd_per_hour: float
    good_share: float  # of the requests keep the SLO
    ttft_p99_ms: float
    itl_p99_ms: float
    reuse_share: float

    @property
    def topology(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"

    @property
    def num_replicas(self) -> int:
        return self.num_prefill + self.num_decode


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    best: Candidate | None  # None: nothing within the limit keeps the SLO
    frontier: list[Candidate]  # cheapest first; each keeps the SLO for more requests than all cheaper ones
    tried: list[Candidate]


def make_plan(
    setup: FleetSetup,
    profile: Profile,
    trace: Sequence[TraceRequest],
    *,
    slo_ttft_s: float,
    slo_itl_s: float,
    good_share: float,
    max_replicas: int,
    tried: Callable[[Candidate], None] = lambda candidate: None,
) -> CapacityPlan:
    """Try topologies of 2, 3, … replicas until one serves `good_share` of the requests within the SLO.

    From one size to the next the split between the pools is that of the best before, with one replica more on either
    side: a pool that was too small stays too small for fewer replicas. Raises SpecError for a limit below 2.
    """
    if max_replicas < 2:
        raise SpecError("a plan needs at least two replicas: one to prefill and one to decode")
    candidates: list[Candidate] = []
    size = 2
    best = None
    while best is None and size <= max_replicas:
        for num_prefill in _splits(size, candidates):
            report = simulate(
                replace(setup, num_prefill=num_prefill, num_decode=size - num_prefill),
                profile,
                trace,
                slo_ttft_s=slo_ttft_s,
                slo_itl_s=slo_itl_s,
            )
            candidates.append(_candidate(num_prefill, size - num_prefill, profile, report))
            tried(candidates[-1])
        enough = [c for c in candidates if c.num_replicas == size and c.good_share >= good_share]
        best = max(enough, key=lambda c: c.good_share, default=None)
        size += 1
    return CapacityPlan(best=best, frontier=frontier(candidates), tried=candidates)


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that nobody beats in both price and share of good requests, cheapest first."""
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.usd_per_hour, -c.good_share)):
        if not chosen or candidate.good_share > chosen[-1].good_share:
            chosen.append(candidate)
    return chosen


def _splits(size: int, candidates: Sequence[Candidate]) -> list[int]:
    """How many of `size` replicas should prefill: near the best split of the size before, one more either way."""
    before = [c for c in candidates if c.num_replicas == size - 1]
    if not before:
        return list(range(1, size))
    num_prefill = max(before, key=lambda c: c.good_share).num_prefill
    return [n for n in (num_prefill, num_prefill + 1) if n < size]


def _candidate(num_prefill: int, num_decode: int, profile: Profile, report: dict[str, Any]) -> Candidate:
    return Candidate(
        num_prefill=num_prefill,
        num_decode=num_decode,
        usd_per_hour=(num_prefill + num_decode) * profile.usd_per_hour,
        good_share=report["good_share"],
        ttft_p99_ms=report["ttft_ms"]["p99"],
        itl_p99_ms=report["itl_ms"]["p99"],
        reuse_share=report["reuse_share"],
    )
