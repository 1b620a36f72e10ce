"""Whether pools may grow on the nodes of now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cluster.control.placement import ResourceDemand, check_fit, live_nodes
from cluster.words.request import Role
from cluster.words.spec import Spec


def check_room(spec: Spec, more: Mapping[Role, int], *, is_draining: bool) -> None:
    """Raises DeployError where there is no room for so many more replicas. is_draining: some are on their way out."""
    nodes = live_nodes()
    if min(more.values(), default=0) < 0 or is_draining:
        nodes = [replace(node, available=node.total) for node in nodes]  # room is being made; who knows where
    check_fit([ResourceDemand(role, spec.pool(role), max(number, 0)) for role, number in more.items()], nodes)
