"""Capacity plan: the cheapest topology that keeps an SLO on a trace, and the price-performance frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from core.trace.trace import TraceRequest
from core.trace.traffic import Slo
from core.types.errors import SpecError
from planner.simulator.profile import FleetSetup, Profile
from planner.simulator.run import simulate

_MAX_CHUNK = 8192  # tokens
_BY_MERIT = attrgetter("merit")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Topology with its simulated performance. Without prefill replicas both roles are colocated: the decode replicas
    compute the prompts."""

    num_prefill: int
    num_decode: int
    prefill_threads: int  # per replica, on a CPU
    decode_threads: int
    decode_batch_tokens: int  # token limit of a step; limits the prompt chunks that decode replicas compute
    size: int  # resources, in replicas of the profile
    usd_per_hour: float
    good_share: float  # share of requests that keep the SLO
    goodput_rps: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    reuse_share: float
    strain: float  # maximum of P99 / limit over TTFT and ITL

    @property
    def topology(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"

    @property
    def is_colocated(self) -> bool:
        return not self.num_prefill

    @property
    def merit(self) -> tuple[float, float]:
        """Sort key: greater means that the SLO is kept better."""
        return self.good_share, -self.strain


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    best: Candidate | None  # None: no topology within the limit keeps the SLO
    # Best topologies with and without prefill replicas, of the size of `best` or the largest size tried; at least 2.
    apart: Candidate
    colocated: Candidate
    frontier: list[Candidate]  # cheapest first; each keeps the SLO for more requests than all cheaper ones
    tried: list[Candidate]


def make_plan(
    setup: FleetSetup,
    profile: Profile,
    trace: Sequence[TraceRequest],
    *,
    slo: Slo,
    good_share: float,
    max_replicas: int,
    tried: Callable[[Candidate], None] = lambda candidate: None,
) -> CapacityPlan:
    """Try 1, 2, 3, … replicas until a topology serves `good_share` of the requests within the SLO.

    Each size is tried with separate roles and colocated. If the profile has step times with more threads (CPU only),
    fewer replicas with more threads are also tried. A size adds one replica, to prefill or to decode, to the best split
    of the previous size, since a pool that was too small stays too small with fewer replicas. Colocated, the chunk size
    is halved or doubled as long as that helps. tried: called with each candidate. Raises SpecError for a limit below 2.
    """
    if max_replicas < 2:
        raise SpecError("a plan needs at least two replicas: one to prefill and one to decode")
    search = _Search(setup, profile, trace, slo, tried)
    best, size = None, 0
    while size < 2 or (best is None and size < max_replicas):
        size += 1
        search.try_all_of(size)
        best = best or max((c for c in search.of(size) if c.good_share >= good_share), key=_BY_MERIT, default=None)
    found = search.of(size)
    return CapacityPlan(
        best=best,
        apart=max((c for c in found if not c.is_colocated), key=_BY_MERIT),
        colocated=max((c for c in found if c.is_colocated), key=_BY_MERIT),
        frontier=frontier(search.found),
        tried=search.found,
    )


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the Pareto frontier of price and share of good requests, cheapest first."""
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.usd_per_hour, -c.good_share, c.strain)):
        if not chosen or candidate.good_share > chosen[-1].good_share:
            chosen.append(candidate)
    return chosen


def draw_frontier(plan: CapacityPlan, path: Path, *, good_share: float) -> None:
    """Draw the frontier as PNG or SVG, by the file's suffix.

    Raises SpecError for another suffix, or without matplotlib, an optional dependency (`pip install xpyd[plot]`).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecError("a plot needs matplotlib: pip install 'xpyd[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(good_share, color="0.7", linestyle="--", label="target")
    tried, frontier = plan.tried, plan.frontier
    axes.scatter([c.usd_per_hour for c in tried], [c.good_share for c in tried], color="0.6", label="tried")
    axes.step(
        [c.usd_per_hour for c in frontier], [c.good_share for c in frontier], where="post", marker="o", label="frontier"
    )
    for candidate in frontier:
        place = (candidate.usd_per_hour, candidate.good_share)
        axes.annotate(candidate.topology, place, textcoords="offset points", xytext=(4, -12))
    axes.set_xlabel("USD per hour")
    axes.set_ylabel("share of requests within the SLO")
    axes.margins(x=0.15, y=0.15)  # room for the labels beside the points
    figure.legend(loc="outside upper center", ncols=3)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise SpecError(f"{path}: {error}") from None


class _Search:
    def __init__(
        self,
        setup: FleetSetup,
        profile: Profile,
        trace: Sequence[TraceRequest],
        slo: Slo,
        tried: Callable[[Candidate], None],
    ) -> None:
        self.found: list[Candidate] = []
        self._setup = setup
        self._profile = profile
        self._trace = trace
        self._slo = slo
        self._tried = tried
        self._widths = [1, *(wider.width for wider in profile.wider)]

    def of(self, size: int) -> list[Candidate]:
        return [candidate for candidate in self.found if candidate.size == size]

    def try_all_of(self, size: int) -> None:
        for for_prefill in self._splits(size):
            for num_prefill, prefill_width in self._replicas(for_prefill):
                for num_decode, decode_width in self._replicas(size - for_prefill):
                    self._try(num_prefill, num_decode, prefill_width=prefill_width, decode_width=decode_width)
        for num_decode, decode_width in self._replicas(size):
            self._try_chunks(num_decode, decode_width=decode_width)

    def _splits(self, size: int) -> list[int]:
        """Return the parts of `size` to try for prefill: the best split of the previous size, with one more to prefill
        or to decode."""
        before = [c for c in self.of(size - 1) if not c.is_colocated]
        if not before:
            return list(range(1, size))
        best = max(before, key=_BY_MERIT)
        for_prefill = best.num_prefill * best.prefill_threads // self._profile.threads
        return [n for n in (for_prefill, for_prefill + 1) if n < size]

    def _replicas(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield (number, width) of replicas with these total resources."""
        return ((size // width, width) for width in self._widths if size % width == 0)

    def _try_chunks(self, num_decode: int, *, decode_width: int) -> None:
        """Halve the chunk size, or double it, as long as the SLO is kept better."""
        first = self._try(0, num_decode, decode_width=decode_width)
        for turn in (0.5, 2.0):
            best, better = first, first.good_share < 1
            while better:
                chunk = int(best.decode_batch_tokens * turn)
                if not self._setup.max_running < chunk <= _MAX_CHUNK:
                    break
                other = self._try(0, num_decode, decode_width=decode_width, decode_batch_tokens=chunk)
                better = other.merit > best.merit
                best = max(best, other, key=_BY_MERIT)
            if best is not first:
                return

    def _try(self, num_prefill: int, num_decode: int, **changes: Any) -> Candidate:
        """Simulate the setup with these changes."""
        setup = replace(self._setup, num_prefill=num_prefill, num_decode=num_decode, **changes)
        report = simulate(setup, self._profile, self._trace, self._slo)
        ttft, itl, threads = report["ttft_ms"], report["itl_ms"], self._profile.threads
        size = num_prefill * setup.prefill_width + num_decode * setup.decode_width
        candidate = Candidate(
            num_prefill=num_prefill,
            num_decode=num_decode,
            prefill_threads=setup.prefill_width * threads,
            decode_threads=setup.decode_width * threads,
            decode_batch_tokens=setup.decode_batch_tokens,
            size=size,
            usd_per_hour=size * self._profile.usd_per_hour,
            good_share=report["good_share"],
            goodput_rps=report["goodput_rps"],
            ttft_p50_ms=ttft["p50"],
            ttft_p99_ms=ttft["p99"],
            itl_p50_ms=itl["p50"],
            itl_p99_ms=itl["p99"],
            reuse_share=report["reuse_share"],
            strain=max(ttft["p99"] / (self._slo.ttft_s * 1e3), itl["p99"] / (self._slo.itl_s * 1e3)),
        )
        self.found.append(candidate)
        self._tried(candidate)
        return candidate
