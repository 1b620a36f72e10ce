"""Search for pool sizes: start from the arithmetic demand, then improve step by step with the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from planner.autoscaler.forecast import LoadForecast
from planner.autoscaler.pool_sizes import Demand, PoolSizes, ScaleLimits
from planner.autoscaler.scaling_decision import Prediction

_FULL = 0.85  # utilization above which a pool builds up queues
_MAX_TRIED = 4


class Outlook(Protocol):
    """Predictions for the forecast load."""

    forecast: LoadForecast

    def predict(self, sizes: PoolSizes, *, load: float = 1.0) -> Prediction:
        """Predict latencies for pools of these sizes. load: factor on the forecast request rate."""
        ...

    def demand(self, *, reuse_share: float) -> Demand: ...


def find_enough(
    outlook: Outlook, limits: ScaleLimits, demand: Demand, now: PoolSizes, *, load: float, attainment: float
) -> tuple[Prediction, list[Prediction]]:
    """Return the best prediction found, and all that were tried.

    Best is a new split of the current devices if it serves `attainment` of the load within the limits; else the
    cheapest sizes that do; else the sizes that serve most.
    """
    target = demand.times(load / _FULL)
    tried: dict[PoolSizes, Prediction] = {}
    for start in (
        limits.evenly(*target, num_devices=limits.num_devices(now)),
        limits.nearest(*target),
    ):
        tried[start] = outlook.predict(start, load=load)
        if tried[start].expected_share >= attainment and limits.num_devices(start) == limits.num_devices(now):
            return tried[start], list(tried.values())

    def worth(prediction: Prediction) -> tuple[bool, float, float, float]:
        is_enough = prediction.expected_share >= attainment
        cost = limits.num_devices(prediction.sizes) if is_enough else 0
        return is_enough, -cost, round(prediction.expected_share, 2), -demand.busy(prediction.sizes)

    while True:
        best = max(tried.values(), key=worth)
        near = [sizes for sizes in _near(best, limits, attainment) if sizes not in tried]
        if not near or len(tried) >= _MAX_TRIED:
            return best, list(tried.values())
        nearest = min(near, key=lambda sizes: _try_order(sizes, target, limits))
        tried[nearest] = outlook.predict(nearest, load=load)


def fewer(sizes: PoolSizes, limits: ScaleLimits, demand: Demand, *, load: float) -> Iterator[PoolSizes]:
    """Yield smaller sizes that the arithmetic demand does not rule out under this load.

    The first drops half of the surplus of each pool; the next drop one replica, from the less busy pool first.
    """
    low = limits.nearest(*demand.times(load / _FULL))
    half = PoolSizes(
        sizes.prefill - max(0, sizes.prefill - low.prefill + 1) // 2,
        sizes.decode - max(0, sizes.decode - low.decode + 1) // 2,
    )
    ones = [PoolSizes(sizes.prefill - 1, sizes.decode), PoolSizes(sizes.prefill, sizes.decode - 1)]
    seen = {sizes}
    for one in [half, *sorted(filter(limits.allow, ones), key=demand.busy)]:
        if one not in seen and limits.allow(one) and demand.times(load).busy(one) < 1:
            seen.add(one)
            yield one


def _near(best: Prediction, limits: ScaleLimits, attainment: float) -> list[PoolSizes]:
    """Return the sizes one step from `best`: smaller if `best` is enough, else larger, else with another split."""
    x, y = best.sizes
    if best.expected_share >= attainment:
        steps = [PoolSizes(x - 1, y), PoolSizes(x, y - 1)]
    else:
        steps = [PoolSizes(x + 1, y), PoolSizes(x, y + 1), PoolSizes(x + 1, y + 1)]
        if not any(map(limits.allow, steps)):
            steps = [PoolSizes(x + 1, y - 1), PoolSizes(x - 1, y + 1)]
    return [sizes for sizes in steps if limits.allow(sizes)]


def _try_order(sizes: PoolSizes, target: Demand, limits: ScaleLimits) -> tuple[float, float]:
    """Return the key by which sizes are tried: lower utilization of the busier pool first, then fewer devices."""
    return target.busy(sizes), limits.num_devices(sizes)
