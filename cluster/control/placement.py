"""Choice of a node for each replica, its resource bundles for Ray, and errors when it fits on no node.

Gang.place (gang.py) reserves the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from core.spec.schema import PoolSpec, Spec
from core.types.errors import DeployError
from core.types.request import Role

Amounts = Mapping[str, float]  # by Ray's resource name
NO_FAILURES: Mapping[str, int] = MappingProxyType({})

_ROUTER_LABELS = {"pool": "router"}
# Resource that Ray gives to the head only.
_HEAD = "node:__internal_head__"


@dataclass(frozen=True)
class Node:
    """Live node of the Ray cluster."""

    id: str
    name: str
    ip: str
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Amounts = field(default_factory=dict)
    available: Amounts = field(default_factory=dict)

    @property
    def is_head(self) -> bool:
        return _HEAD in self.total


def bundle(pool: PoolSpec) -> dict[str, float]:
    """Return the Ray resources of one rank."""
    amounts = {"CPU": pool.resources.cpus, "GPU": pool.resources.gpus, **pool.resources.custom}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def pools_of(spec: Spec) -> dict[Role, PoolSpec]:
    return {role: spec.pool(role) for role in Role}


def check_fit(nodes: Sequence[Node], pools: Mapping[Role, PoolSpec], counts: Mapping[Role, int]) -> None:
    """Raise DeployError with one line if `counts` replicas of the pools do not fit into what is available on `nodes`.

    A replica's ranks share one node. Pools with the fewest candidate nodes are placed first, each replica on the node
    with the most room left. The search is greedy: a set of pools that fits only in an unusual arrangement may be
    rejected.
    """
    left = {node.id: dict(node.available) for node in nodes}
    candidates = {role: _candidates(pools[role], nodes) for role, count in counts.items() if count}
    for role in sorted(candidates, key=lambda role: len(candidates[role])):
        if problem := _never_fits(pools[role], nodes):
            raise DeployError(f"{role}: {problem}")
        need = _gang(pools[role])
        for placed in range(counts[role]):
            best = max(candidates[role], key=lambda node: _times(need, left[node.id]))
            if _times(need, left[best.id]) < 1:
                raise DeployError(f"{role}: room for {placed} of {counts[role]} replicas; {_each_needs(need)}")
            _take(need, left[best.id])


def fits_when_empty(pool: PoolSpec, node: Node) -> bool:
    """Return whether `node` could run a replica of `pool` if nothing else ran there."""
    return not _never_fits(pool, [node])


def why_pending(pool: PoolSpec, nodes: Sequence[Node]) -> str:
    """Return why one more replica of `pool` cannot be placed; empty if it can."""
    if problem := _never_fits(pool, nodes):
        return problem
    need = _gang(pool)
    if any(_times(need, node.available) >= 1 for node in _candidates(pool, nodes)):
        return ""
    return f"no room at present; {_each_needs(need)}"


def preferred_node(
    pool: PoolSpec, nodes: Sequence[Node], *, taken: Mapping[str, int], failures: Mapping[str, int] = NO_FAILURES
) -> Node | None:
    """Return the node for the pool's next replica, or None if there is no room.

    Spreads replicas, so that a failing host takes few of them.

    taken: number of the pool's replicas by node id; among equals the node with the most room wins. failures: the pool's
    recent failed starts by node name. Nodes with failures come last: having no replica, such a node would otherwise be
    chosen until the pool gives up.
    """
    need = _gang(pool)
    room = {node.id: _times(need, node.available) for node in nodes}
    free = [node for node in _candidates(pool, nodes) if room[node.id] >= 1]

    def rank(node: Node) -> tuple[int, int, int, str]:
        return failures.get(node.name, 0), taken.get(node.id, 0), -room[node.id], node.id

    return min(free, key=rank, default=None)


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether `labels` satisfy `selector`, by Ray's rules: VALUE, !VALUE, in(A,B), !in(A,B)."""
    return all(_matches_one(labels.get(key), condition) for key, condition in selector.items())


def router_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes for routers: those with the label `pool: router`, else the head."""
    nodes = list(nodes)
    return [node for node in nodes if matches(node.labels, _ROUTER_LABELS)] or [node for node in nodes if node.is_head]


def as_a_router(nodes: Iterable[Node]) -> dict[str, Any]:
    """Return Ray's options for an actor that runs on one of the router_nodes(), also after a restart."""
    is_labelled = any(matches(node.labels, _ROUTER_LABELS) for node in nodes)
    return {"label_selector": _ROUTER_LABELS} if is_labelled else on_the_head()


def on_the_head() -> dict[str, Any]:
    """Return Ray's options for an actor that runs on the head only."""
    return {"resources": {_HEAD: 0.001}}


def live_nodes() -> list[Node]:
    """Return the live nodes of the Ray cluster that this process is connected to."""
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


def check_room(spec: Spec, more: Mapping[Role, int], *, is_draining: bool) -> None:
    """Raise DeployError if the nodes lack room for `more` replicas. is_draining: some room is about to be freed."""
    nodes = live_nodes()
    if min(more.values(), default=0) < 0 or is_draining:
        # Room is being freed, on nodes that are not known yet: count all of it.
        nodes = [replace(node, available=node.total) for node in nodes]
    check_fit(nodes, pools_of(spec), {role: max(number, 0) for role, number in more.items()})


def share_out(
    nodes: Sequence[Node], pools: Mapping[Role, PoolSpec], waiting: Mapping[Role, int], lacking: Mapping[Role, int]
) -> dict[Role, int]:
    """Return how many missing replicas of each pool fit in addition to those already waiting. Pure.

    Pools take turns, one replica each, so that no pool starves another.
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


def run_on(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start `function` on the node. Returns a Ray reference to its result, which fails if the node is lost."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(scheduling_strategy=there).remote(*args, **kwargs)


def _fits(nodes: Sequence[Node], pools: Mapping[Role, PoolSpec], counts: Mapping[Role, int]) -> bool:
    try:
        check_fit(nodes, pools, counts)
    except DeployError:
        return False
    return True


def _candidates(pool: PoolSpec, nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if matches(node.labels, pool.labels)]


def _never_fits(pool: PoolSpec, nodes: Sequence[Node]) -> str:
    """Return why no node could take a replica even if it were empty; empty if one could."""
    candidates = _candidates(pool, nodes)
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
    """Return how many times `need` fits into `have`. Ray counts in ten-thousandths."""
    return min(round(have.get(name, 0.0) * 10_000) // round(amount * 10_000) for name, amount in need.items())


def _take(need: Amounts, have: dict[str, float]) -> None:
    for name, amount in need.items():
        have[name] -= amount


def _matches_one(value: str | None, condition: str) -> bool:
    pattern = condition.removeprefix("!")
    if pattern.startswith("in(") and pattern.endswith(")"):
        is_equal = value in [option.strip() for option in pattern[3:-1].split(",")]
    else:
        is_equal = value == pattern
    return is_equal != condition.startswith("!")


def _each_needs(need: Amounts) -> str:
    return f"each replica needs {_amounts(need)}"


def _amounts(amounts: Amounts) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _pairs(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items())
