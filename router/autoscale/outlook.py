"""What is known of the time that is decided for, as a decision asks for it."""

from __future__ import annotations

from typing import Protocol

from router.autoscale.demand import Demand
from router.autoscale.forecast import LoadForecast
from router.autoscale.pool_sizes import PoolSizes
from router.autoscale.scaling_decision import Prediction


class Outlook(Protocol):
    """Of the load that is forecast."""

    forecast: LoadForecast

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        """load: so many times as many requests as are forecast."""
        ...

    def demand(self, *, reuse_share: float) -> Demand: ...
