"""How many replicas a load keeps busy."""

from __future__ import annotations

from dataclasses import dataclass

from planner.autoscaler.pool_sizes import PoolSizes


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Replicas that would be busy all the time, fractions included."""

    prefill: float
    decode: float

    @property
    def replicas(self) -> tuple[float, float]:
        return self.prefill, self.decode

    def busy(self, sizes: PoolSizes) -> float:
        """The share of its time in which the busier pool computes."""
        return max(self.prefill / sizes.prefill, self.decode / sizes.decode)

    def done(self, sizes: PoolSizes) -> float:
        """The share of the work that such pools can do."""
        return min(1.0, 1 / max(self.busy(sizes), 1e-9))

    def times(self, factor: float) -> Demand:
        return Demand(prefill=self.prefill * factor, decode=self.decode * factor)
