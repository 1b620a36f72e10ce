"""Interface to the predictions that a scaling decision needs."""

from __future__ import annotations

from typing import Protocol

from planner.autoscaler.demand import Demand
from planner.autoscaler.forecast import LoadForecast
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.scaling_decision import Prediction


class Outlook(Protocol):
    """Predictions for the forecast load."""

    forecast: LoadForecast

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        """Predict latencies for pools of these sizes. load: factor on the forecast request rate."""
        ...

    def demand(self, *, reuse_share: float) -> Demand: ...
