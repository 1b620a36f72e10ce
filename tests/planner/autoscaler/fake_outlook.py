"""Outlook by arithmetic: deterministic, and without the seconds that a simulation takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planner.autoscaler.forecast import LoadForecast
from planner.autoscaler.pool_sizes import Demand, PoolSizes
from planner.autoscaler.scaling_decision import Prediction

_STEEP = 30.0


def forecast_of(rate: float = 1.0) -> LoadForecast:
    return LoadForecast(seen_rate=rate, seen_prompt=100.0, seen_answer=100.0, rate=rate, prompt=100.0, answer=100.0)


@dataclass
class FakeOutlook:
    """Implementation of Outlook in which a pool keeps its limit for nearly all requests up to 90 % utilization."""

    prefill: float  # replicas that the load keeps busy
    decode: float
    forecast: LoadForecast = field(default_factory=forecast_of)
    num_asked: int = 0

    def demand(self, *, reuse_share: float) -> Demand:
        return Demand(self.prefill, self.decode)

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        self.num_asked += 1
        in_ttft = _kept(load * self.prefill / sizes.prefill)
        in_itl = _kept(load * self.decode / sizes.decode)
        return Prediction(
            sizes=sizes,
            load=load,
            good_share=in_ttft * in_itl,
            ttft_share=in_ttft,
            itl_share=in_itl,
            ttft_p50_s=0.5,
            ttft_p90_s=1.0,
            itl_s=0.02,
            reuse_share=0.0,
        )


def _kept(busy: float) -> float:
    return 1 / (1 + math.exp(min(50.0, _STEEP * (busy - 1.0))))
