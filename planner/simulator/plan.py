"""Capacity plan: the cheapest topology that keeps an SLO on a trace, and the price-performance frontier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from core.trace.trace import TraceRequest
from core.types.errors import SpecError
from planner.simulator.candidate import Candidate, Trial
from planner.simulator.fleet_setup import FleetSetup
from planner.simulator.profile import Profile

_MAX_CHUNK = 8192  # tokens


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
    slo_ttft_s: float,
    slo_itl_s: float,
    good_share: float,
    max_replicas: int,
    tried: Callable[[Candidate], None] = lambda candidate: None,
) -> CapacityPlan:
    """Try 1, 2, 3, … replicas until a topology serves `good_share` of the requests within the SLO.

    Each size is tried with separate roles and colocated. On a CPU with a profile of wider replicas, fewer but wider
    replicas are also tried. From one size to the next, the best split so far gets one more replica on either side,
    since a pool that was too small stays too small with fewer replicas. Colocated, the chunk size is halved or doubled
    as long as that helps. tried: called with each candidate. Raises SpecError for a limit below 2.
    """
    if max_replicas < 2:
        raise SpecError("a plan needs at least two replicas: one to prefill and one to decode")
    trial = Trial(setup=setup, profile=profile, trace=trace, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)
    search = _Search(trial, tried)
    best, size = None, 0
    while size < 2 or (best is None and size < max_replicas):
        size += 1
        search.try_all_of(size)
        best = best or max((c for c in search.of(size) if c.good_share >= good_share), key=_merit, default=None)
    found = search.of(size)
    return CapacityPlan(
        best=best,
        apart=max((c for c in found if not c.is_colocated), key=_merit),
        colocated=max((c for c in found if c.is_colocated), key=_merit),
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


class _Search:
    def __init__(self, trial: Trial, tried: Callable[[Candidate], None]) -> None:
        self.found: list[Candidate] = []
        self._trial = trial
        self._tried = tried
        self._widths = [1, *(wider.width for wider in trial.profile.wider)]

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
        """Return the parts of `size` to try for prefill: the best split of the previous size, with one more on either
        side."""
        before = [c for c in self.of(size - 1) if not c.is_colocated]
        if not before:
            return list(range(1, size))
        best = max(before, key=_merit)
        for_prefill = best.num_prefill * best.prefill_threads // self._trial.profile.threads
        return [n for n in (for_prefill, for_prefill + 1) if n < size]

    def _replicas(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield (number, width) of replicas with these total resources."""
        return ((size // width, width) for width in self._widths if size % width == 0)

    def _try_chunks(self, num_decode: int, *, decode_width: int) -> None:
        """Halve the chunk size, or double it, as long as the SLO is kept better."""
        setup = self._trial.setup
        first = self._try(0, num_decode, decode_width=decode_width)
        for turn in (0.5, 2.0):
            best, better = first, first.good_share < 1
            while better:
                chunk = int(best.decode_batch_tokens * turn)
                if not setup.max_running < chunk <= _MAX_CHUNK:
                    break
                other = self._try(0, num_decode, decode_width=decode_width, decode_batch_tokens=chunk)
                better = other.merit > best.merit
                best = max(best, other, key=_merit)
            if best is not first:
                return

    def _try(self, num_prefill: int, num_decode: int, **changes: int) -> Candidate:
        self.found.append(self._trial.of(num_prefill=num_prefill, num_decode=num_decode, **changes))
        self._tried(self.found[-1])
        return self.found[-1]


def _merit(candidate: Candidate) -> tuple[float, float]:
    return candidate.merit
