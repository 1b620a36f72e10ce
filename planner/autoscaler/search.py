"""The sizes to try, and the best of them: near those that arithmetic finds, one step at a time, by the simulator."""

from __future__ import annotations

from collections.abc import Iterator

from planner.autoscaler.demand import Demand
from planner.autoscaler.outlook import Outlook
from planner.autoscaler.pool_sizes import PoolSizes, ScaleLimits
from planner.autoscaler.scaling_decision import Prediction

FULL = 0.85  # of its time: a pool that computes more than that has queues
_MOST_TRIED = 4


def find_enough(
    outlook: Outlook, limits: ScaleLimits, demand: Demand, now: PoolSizes, *, load: float, attainment: float
) -> tuple[Prediction, list[Prediction]]:
    """As many devices as there are now, split otherwise, where that serves `attainment` of so much load within the
    limits; else the cheapest sizes that do, or those that serve most of it; and all that were tried."""
    wanted = demand.times(load / FULL)
    tried: dict[PoolSizes, Prediction] = {}
    for start in (
        limits.evenly(*wanted.replicas, num_devices=limits.num_devices(now)),
        limits.nearest(*wanted.replicas),
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
        if not near or len(tried) >= _MOST_TRIED:
            return best, list(tried.values())
        nearest = min(near, key=lambda sizes: _fit(sizes, wanted, limits))
        tried[nearest] = outlook.predict(nearest, load=load)


def fewer(sizes: PoolSizes, limits: ScaleLimits, demand: Demand, *, load: float) -> Iterator[PoolSizes]:
    """Smaller ones that arithmetic does not rule out under so much load: first half of what seems too many of each
    pool, then one replica less, of the pool first that has more to spare."""
    wanted = demand.times(load / FULL)
    low = limits.nearest(*wanted.replicas)
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
    """One step from the best: cheaper where it is enough, else larger, and where that may not be, split otherwise."""
    x, y = best.sizes
    if best.expected_share >= attainment:
        steps = [PoolSizes(x - 1, y), PoolSizes(x, y - 1)]
    else:
        steps = [PoolSizes(x + 1, y), PoolSizes(x, y + 1), PoolSizes(x + 1, y + 1)]
        if not any(map(limits.allow, steps)):
            steps = [PoolSizes(x + 1, y - 1), PoolSizes(x - 1, y + 1)]
    return [sizes for sizes in steps if limits.allow(sizes)]


def _fit(sizes: PoolSizes, wanted: Demand, limits: ScaleLimits) -> tuple[float, float]:
    """How busy the busier pool would be: of those that are near, the likeliest to be enough comes first."""
    return wanted.busy(sizes), limits.num_devices(sizes)
