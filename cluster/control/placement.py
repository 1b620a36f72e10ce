"""Where replicas fit: bundles for Ray, and a plain answer for the operator when they fit nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from core.spec.schema import PoolSpec
from core.types.errors import DeployError
from core.types.request import Role

Amounts = Mapping[str, float]  # by Ray's resource name
NO_FAILURES: Mapping[str, int] = MappingProxyType({})

_ROUTER_LABELS = {"pool": "router"}
_HEAD = "node:__internal_head__"  # a resource that Ray gives to its head, and to no other node


@dataclass(frozen=True)
class Node:
    """A living node of the Ray cluster."""

    id: str
    name: str
    ip: str
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)
    available: Amounts = field(default_factory=dict)

    @property
    def is_head(self) -> bool:
        return _HEAD in self.total


@dataclass(frozen=True)
class ResourceDemand:
    """Replicas of one pool that still need a place."""

    role: Role
    pool: PoolSpec
    count: int


def bundle(pool: PoolSpec) -> dict[str, float]:
    """What one rank needs, in Ray's words."""
    amounts = {"CPU": pool.resources.cpus, "GPU": pool.resources.gpus, **pool.resources.custom}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def check_fit(demands: Iterable[ResourceDemand], nodes: Sequence[Node]) -> None:
    """Raise DeployError, in one line, when these replicas cannot all be placed on what `nodes` have available.

    A replica's ranks share one node. Pools with the fewest nodes to choose from are placed first, each replica on the
    node that has the most left; so a set of pools that fits only by an odd arrangement may be refused.
    """
    left = {node.id: dict(node.available) for node in nodes}
    demands = [demand for demand in demands if demand.count]
    for demand in sorted(demands, key=lambda d: len(_candidates(d.pool, nodes))):
        candidates = _candidates(demand.pool, nodes)
        if problem := _never_fits(demand.pool, nodes, candidates):
            raise DeployError(f"{demand.role}: {problem}")
        need = _gang(demand.pool)
        for placed in range(demand.count):
            best = max(candidates, key=lambda node: _times(need, left[node.id]))
            if _times(need, left[best.id]) < 1:
                raise DeployError(f"{demand.role}: room for {placed} of {demand.count} replicas; {_each_needs(need)}")
            _take(need, left[best.id])


def fits_when_empty(pool: PoolSpec, node: Node) -> bool:
    """Return whether `node` could run a replica of `pool` if nothing else ran there."""
    return not _never_fits(pool, [node], _candidates(pool, [node]))


def why_pending(pool: PoolSpec, nodes: Sequence[Node]) -> str:
    """Why one more replica of `pool` waits for a place; empty when nothing stands in its way."""
    candidates = _candidates(pool, nodes)
    if problem := _never_fits(pool, nodes, candidates):
        return problem
    need = _gang(pool)
    if any(_times(need, node.available) >= 1 for node in candidates):
        return ""
    return f"no room at present; {_each_needs(need)}"


def preferred_node(
    pool: PoolSpec, nodes: Sequence[Node], *, taken: Mapping[str, int], failures: Mapping[str, int] = NO_FAILURES
) -> Node | None:
    """Where the pool's next replica goes: a host that fails should take few of them along. None: there is no room now.

    taken: how many replicas of the pool each node has, by its id; of nodes with equally few the one with the most
    room. failures: how many of the pool's last starts failed on each, by its name: those come last, or the one where
    starts fail, which has no replica, would be chosen until the pool gives up.
    """
    need = _gang(pool)
    room = {node.id: _times(need, node.available) for node in nodes}
    free = [node for node in _candidates(pool, nodes) if room[node.id] >= 1]

    def rank(node: Node) -> tuple[int, int, int, str]:
        return failures.get(node.name, 0), taken.get(node.id, 0), -room[node.id], node.id

    return min(free, key=rank, default=None)


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node with `labels` satisfies `selector`, by Ray's rules: VALUE, !VALUE, in(A,B), !in(A,B)."""
    return all(_matches_one(labels.get(key), condition) for key, condition in selector.items())


def router_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Where routers run: on the nodes with the label `pool: router`; where there are none, on the head."""
    nodes = list(nodes)
    return [node for node in nodes if matches(node.labels, _ROUTER_LABELS)] or [node for node in nodes if node.is_head]


def as_a_router(nodes: Iterable[Node]) -> dict[str, Any]:
    """Ray's options for an actor that is to run on one of the router_nodes(), also when it starts again."""
    is_labelled = any(matches(node.labels, _ROUTER_LABELS) for node in nodes)
    return {"label_selector": _ROUTER_LABELS} if is_labelled else on_the_head()


def on_the_head() -> dict[str, Any]:
    """Ray's options for an actor that is to run on the head, and nowhere else while the head is away."""
    return {"resources": {_HEAD: 0.001}}


def live_nodes() -> list[Node]:
    """The nodes of the Ray cluster to which this process is connected."""
    import ray

    from cluster.ray import internals

    available = internals.available_resources()
    return [
        Node(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            ip=node["NodeManagerAddress"],
            labels=node["Labels"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _candidates(pool: PoolSpec, nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if matches(node.labels, pool.labels)]


def _never_fits(pool: PoolSpec, nodes: Sequence[Node], candidates: Sequence[Node]) -> str:
    """Why no node could ever take a replica, were it empty; empty when one could."""
    if not candidates:
        seen = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items() if key in pool.labels})
        return f"no node has the labels {_pairs(pool.labels)}; nodes have {', '.join(seen) or 'none of these keys'}"
    need = _gang(pool)
    if any(_times(need, node.total) >= 1 for node in candidates):
        return ""
    most = {name: max(node.total.get(name, 0.0) for node in candidates) for name in need}
    where = f" with labels {_pairs(pool.labels)}" if pool.labels else ""
    return f"{_each_needs(need)}, on one node; the most that a node{where} has is {_amounts(most)}"


def _gang(pool: PoolSpec) -> dict[str, float]:
    return {name: amount * pool.tensor_parallel for name, amount in bundle(pool).items()}


def _times(need: Amounts, have: Amounts) -> int:
    """How often `need` fits into `have`. Ray counts in ten-thousandths."""
    return min(round(have.get(name, 0.0) * 10_000) // round(amount * 10_000) for name, amount in need.items())


def _take(need: Amounts, have: dict[str, float]) -> None:
    for name, amount in need.items():
        have[name] -= amount


def _matches_one(value: str | None, condition: str) -> bool:
    wanted = condition.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        is_equal = value in [option.strip() for option in wanted[3:-1].split(",")]
    else:
        is_equal = value == wanted
    return is_equal != condition.startswith("!")


def _each_needs(need: Amounts) -> str:
    return f"each replica needs {_amounts(need)}"


def _amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())
