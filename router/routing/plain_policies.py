"""The policies that everybody has, for comparison; and all policies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.spec.plugin import find, made
from router.routing.cost_policy import CostPolicy
from router.routing.policy import CandidateReplica, Option, Policy, RoutingRequest

_MIN_SHARE = 0.1  # of the prompt must be cached before affinity counts
_IMBALANCE = 32  # streams by which the busiest may lead the idlest before affinity is given up

View = CandidateReplica
Choose = Callable[[RoutingRequest, Sequence[View]], View]


class PoolByPool:
    """Decides in each pool by the same rule, whatever comes of it in the other."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def options(self, demand: RoutingRequest, prefills: Sequence[View], decodes: Sequence[View]) -> Sequence[Option]:
        if not decodes:
            return []
        decode = self._choose(demand, decodes)
        prefill = self._choose(demand, prefills) if prefills else None
        return [Option(prefill=prefill.replica if prefill else None, decode=decode.replica)]


class RoundRobin:
    """One after the other, each pool for itself."""

    def __init__(self) -> None:
        self._turn = 0

    def options(self, demand: RoutingRequest, prefills: Sequence[View], decodes: Sequence[View]) -> Sequence[Option]:
        self._turn += 1
        return PoolByPool(lambda _, views: views[self._turn % len(views)]).options(demand, prefills, decodes)


POLICIES: dict[str, Callable[[], Policy]] = {
    "cost": CostPolicy,
    "prefix": lambda: PoolByPool(_nearest),
    "least_loaded": lambda: PoolByPool(_idlest),
    "round_robin": RoundRobin,
}


def make_policy(name: str, *, prefix_fetches: bool = False) -> Policy:
    """By its name in POLICIES, or MODULE:NAME. Only cost knows of pulling from a peer. Raises SpecError."""
    make = find(name, POLICIES)
    return CostPolicy(prefix_fetches=prefix_fetches) if make is CostPolicy else made(name, make)


def _idlest(_: RoutingRequest, views: Sequence[View]) -> View:
    """The shortest queue, then the fewest streams."""
    return min(views, key=lambda view: (view.queue_s, view.num_streams))


def _nearest(demand: RoutingRequest, views: Sequence[View]) -> View:
    """The longest cached prefix, unless it is short or the load has become uneven."""
    streams = [view.num_streams for view in views]
    nearest = max(views, key=lambda view: (view.cached_tokens, -view.queue_s, -view.num_streams))
    if max(streams) - min(streams) > _IMBALANCE or nearest.cached_tokens < _MIN_SHARE * demand.num_tokens:
        return _idlest(demand, views)
    return nearest
