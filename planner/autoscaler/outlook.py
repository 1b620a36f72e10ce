"""What is known of the time that is decided for, as a decision asks for it."""

from __future__ import annotations

from typing import Protocol

from planner.autoscaler.demand import Demand
from planner.autoscaler.forecast import LoadForecast
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction


class Outlook(Protocol):
    """Of the load that is forecast."""

    forecast: LoadForecast

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        """load: so many times as many requests as are forecast."""
        ...

    def demand(self, *, reuse_share: float) -> Demand: ...
