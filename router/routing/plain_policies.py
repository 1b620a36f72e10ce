"""Baseline policies for comparison, and the table of all policies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.spec.plugin import find, made
from router.routing.cost_policy import CostPolicy
from router.routing.policy import CandidateReplica, Option, Policy, RoutingRequest

_MIN_SHARE = 0.1  # cached fraction of the prompt below which affinity is ignored
_IMBALANCE = 32  # difference in streams between busiest and idlest replica above which affinity is ignored

View = CandidateReplica
Choose = Callable[[RoutingRequest, Sequence[View]], View]


class PoolByPool:
    """Policy that applies one rule to each pool independently."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def options(self, demand: RoutingRequest, prefills: Sequence[View], decodes: Sequence[View]) -> Sequence[Option]:
        if not decodes:
            return []
        decode = self._choose(demand, decodes)
        prefill = self._choose(demand, prefills) if prefills else None
        return [Option(prefill=prefill.replica if prefill else None, decode=decode.replica)]


class RoundRobin:
    """Policy that takes the replicas of each pool in turn."""

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
    """Build a policy by its name in POLICIES, or as MODULE:NAME. Raises SpecError.

    prefix_fetches: replicas may fetch blocks from each other; only the cost policy uses it.
    """
    make = find(name, POLICIES)
    return CostPolicy(prefix_fetches=prefix_fetches) if make is CostPolicy else made(name, make)


def _idlest(_: RoutingRequest, views: Sequence[View]) -> View:
    """Pick the replica with the shortest queue, then the fewest streams."""
    return min(views, key=lambda view: (view.queue_s, view.num_streams))


def _nearest(demand: RoutingRequest, views: Sequence[View]) -> View:
    """Pick the longest cached prefix, or the idlest replica if the prefix is short or the load is uneven."""
    streams = [view.num_streams for view in views]
    nearest = max(views, key=lambda view: (view.cached_tokens, -view.queue_s, -view.num_streams))
    if max(streams) - min(streams) > _IMBALANCE or nearest.cached_tokens < _MIN_SHARE * demand.num_tokens:
        return _idlest(demand, views)
    return nearest
