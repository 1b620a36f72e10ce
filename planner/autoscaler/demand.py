"""Number of replicas that a load keeps busy."""

from __future__ import annotations

from dataclasses import dataclass

from planner.autoscaler.pool_sizes import PoolSizes


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Replicas of each pool that the load keeps fully busy, fractions included."""

    prefill: float
    decode: float

    @property
    def replicas(self) -> tuple[float, float]:
        return self.prefill, self.decode

    def busy(self, sizes: PoolSizes) -> float:
        """Return the utilization of the busier pool; above 1 means overload."""
        return max(self.prefill / sizes.prefill, self.decode / sizes.decode)

    def done(self, sizes: PoolSizes) -> float:
        """Return the share of the work that pools of these sizes can do, at most 1."""
        return min(1.0, 1 / max(self.busy(sizes), 1e-9))

    def times(self, factor: float) -> Demand:
        return Demand(prefill=self.prefill * factor, decode=self.decode * factor)
