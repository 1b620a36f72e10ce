"""Capacity checks for growing pools on the current nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.control.placement import Node, ResourceDemand, check_fit, live_nodes
from core.spec.schema import PoolSpec, Spec
from core.types.errors import DeployError
from core.types.request import Role


def check_room(spec: Spec, more: Mapping[Role, int], *, is_draining: bool) -> None:
    """Raise DeployError if the nodes lack room for `more` replicas. is_draining: some replicas are about to free
    theirs."""
    nodes = live_nodes()
    if min(more.values(), default=0) < 0 or is_draining:
        # Room is being freed, on nodes that are not known yet: count all of it.
        nodes = [replace(node, available=node.total) for node in nodes]
    check_fit([ResourceDemand(role, spec.pool(role), max(number, 0)) for role, number in more.items()], nodes)


def share_out(
    nodes: Sequence[Node], pools: Mapping[Role, PoolSpec], waiting: Mapping[Role, int], lacking: Mapping[Role, int]
) -> dict[Role, int]:
    """Return how many missing replicas of each pool fit in addition to those already waiting. Pure.

    Pools take turns, one replica each, so that none starves another.
    """
    found = dict.fromkeys(pools, 0)
    growing = [role for role in pools if lacking[role]]
    while growing:
        for role in list(growing):
            more = found | {role: found[role] + 1}
            if more[role] > lacking[role] or not _fits(nodes, pools, {one: waiting[one] + more[one] for one in pools}):
                growing.remove(role)
            else:
                found = more
    return found


def _fits(nodes: Sequence[Node], pools: Mapping[Role, PoolSpec], counts: Mapping[Role, int]) -> bool:
    try:
        check_fit([ResourceDemand(role, pools[role], count) for role, count in counts.items()], nodes)
    except DeployError:
        return False
    return True
