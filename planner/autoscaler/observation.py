"""Observation that a scaling decision is based on: plain values, for live and simulated deployments alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from core.spec.schema import Spec
from core.trace.traffic import ReplicaReport, SeenRequest, Slo
from planner.autoscaler.pool_sizes import PoolSizes, ScaleMoves

HOT = 0.9  # saturation above which a pool is too small
_RELIEF = 0.8  # maximum ratio of the new saturation to the old one for a useful switch


@dataclass(frozen=True, kw_only=True)
class ChangePrice:
    """Measured durations of changes, in seconds."""

    start_prefill_s: float
    start_decode_s: float
    drain_s: float
    switch_s: float | None  # role switch after the drain; None: replicas cannot switch

    def delay_s(self, moves: ScaleMoves) -> float:
        """Return the time until all moves are done."""
        return max(
            self.drain_s + (self.switch_s or 0.0) if moves.num_switches else 0.0,
            self.start_prefill_s if moves.start_prefill else 0.0,
            self.start_decode_s if moves.start_decode else 0.0,
        )

    def lost_s(self, moves: ScaleMoves) -> float:
        """Return the replica-seconds without service."""
        return moves.num_switches * (self.drain_s + (self.switch_s or 0.0))


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """Measured load of each pool relative to its capacity; 1 is full."""

    prefill: float  # seconds of queued prompts / TTFT limit
    decode: float  # maximum of: KV in use / capacity, streams / max_running, mean ITL / ITL limit

    def relieved(self, now: PoolSizes, then: PoolSizes) -> bool:
        """Return whether changing the split relieves a hot pool: the busier pool afterwards is clearly less busy.

        The margin prevents switching back and forth.
        """
        if max(self.prefill, self.decode) <= HOT or not (then.prefill and then.decode):
            return False
        busier = max(self.prefill * now.prefill / then.prefill, self.decode * now.decode / then.decode)
        return busier <= _RELIEF * max(self.prefill, self.decode)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """State of a deployment at now_s."""

    now_s: float  # on the clock of the requests' arrival times
    sizes: PoolSizes  # desired sizes; an earlier change may still be in progress
    requests: Sequence[SeenRequest]  # requests of the last minutes, in order of arrival
    saturation: Saturation
    price: ChangePrice
    is_changing: bool = False  # an earlier change is still in progress

    def moves_to(self, sizes: PoolSizes) -> ScaleMoves:
        return ScaleMoves.between(self.sizes, sizes, has_switch=self.price.switch_s is not None)

    def measured(self, slo: Slo, *, since_s: float) -> dict[str, float]:
        """Summarize requests that arrived since since_s and have ended or are already late.

        Returns num, good_share, ttft_p50_s and itl_s (mean).
        """
        new = [r for r in self.requests if r.arrival_s >= since_s]
        late = [r for r in new if r.ttft_s is None and not r.is_over and self.now_s - r.arrival_s > slo.ttft_s]
        over = [r for r in new if r.is_over]
        ttft = [r.ttft_s for r in over if r.ttft_s is not None] + [self.now_s - r.arrival_s for r in late]
        itl = [r.itl_s for r in over if r.itl_s]
        good = sum(r.ttft_s is not None and slo.is_kept(r.ttft_s, r.itl_s or 0.0) for r in over)
        num = len(over) + len(late)
        return {
            "num": num,
            "good_share": good / num if num else 1.0,
            "ttft_p50_s": median(ttft) if ttft else 0.0,
            "itl_s": fmean(itl) if itl else 0.0,
        }


@dataclass(frozen=True, kw_only=True)
class LiveObservation:
    """Input of a decision about a live deployment: plain values, for a separate process."""

    spec: Spec  # has `autoscale`
    now_s: float  # on the clock of the requests' arrival times
    time_s: float  # unix time
    requests: Sequence[SeenRequest]
    replicas: Sequence[ReplicaReport]
    num_waiting: int
    price: ChangePrice
    is_changing: bool
