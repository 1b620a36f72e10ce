"""What an autoscaler sees when it decides: plain values, the same of a live deployment and of a simulated one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from core.trace.traffic import SeenRequest
from planner.autoscaler.pool_sizes import PoolSizes, ScaleMoves

HOT = 0.9  # a pool has too little from here on
_RELIEF = 0.8


@dataclass(frozen=True, kw_only=True)
class ChangePrice:
    """What changes have been measured to take, in seconds."""

    start_prefill_s: float
    start_decode_s: float
    drain_s: float
    switch_s: float | None  # of a role, behind the drain; None: replicas keep their role

    def delay_s(self, moves: ScaleMoves) -> float:
        """Until the last of these is done."""
        return max(
            self.drain_s + (self.switch_s or 0.0) if moves.num_switches else 0.0,
            self.start_prefill_s if moves.start_prefill else 0.0,
            self.start_decode_s if moves.start_decode else 0.0,
        )

    def lost_s(self, moves: ScaleMoves) -> float:
        """Seconds of one replica that serve nobody."""
        return moves.num_switches * (self.drain_s + (self.switch_s or 0.0))


@dataclass(frozen=True, kw_only=True)
class Saturation:
    """How full each pool is, measured: 1 is all that there is."""

    prefill: float  # seconds of prompts that wait, of those that the limit leaves
    decode: float  # the largest of: KV in use, streams of those that it takes, mean ITL of the limit

    def relieved(self, now: PoolSizes, then: PoolSizes) -> bool:
        """Whether a pool that has too little would get it from the other: what is busier then is clearly less so than
        what is busier now. Going back would be no relief."""
        if max(self.prefill, self.decode) <= HOT or not (then.prefill and then.decode):
            return False
        busier = max(self.prefill * now.prefill / then.prefill, self.decode * now.decode / then.decode)
        return busier <= _RELIEF * max(self.prefill, self.decode)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """At now_s, of the clock by which requests arrived."""

    now_s: float
    sizes: PoolSizes  # that are wanted
    requests: Sequence[SeenRequest]  # of the last minutes, in order of arrival
    saturation: Saturation
    price: ChangePrice
    is_changing: bool = False  # an earlier change is still under way

    def measured(self, *, since_s: float, slo_ttft_s: float, slo_itl_s: float) -> dict[str, float]:
        """Of the requests that arrived since then and are over, or late already: num, good_share, ttft_p50_s, itl_s."""
        new = [r for r in self.requests if r.arrival_s >= since_s]
        late = [r for r in new if r.ttft_s is None and not r.is_over and self.now_s - r.arrival_s > slo_ttft_s]
        over = [r for r in new if r.is_over]
        ttft = [r.ttft_s for r in over if r.ttft_s is not None] + [self.now_s - r.arrival_s for r in late]
        itl = [r.itl_s for r in over if r.itl_s]
        good = sum(r.is_good(slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s) for r in over)
        num = len(over) + len(late)
        return {
            "num": num,
            "good_share": good / num if num else 1.0,
            "ttft_p50_s": median(ttft) if ttft else 0.0,
            "itl_s": fmean(itl) if itl else 0.0,
        }
