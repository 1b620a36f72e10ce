"""Placement of replicas, and the errors when they do not fit."""

from __future__ import annotations

import pytest

from cluster.control.placement import (
    Node,
    bundle,
    check_fit,
    matches,
    preferred_node,
    share_out,
    why_pending,
)
from core.spec.schema import PoolSpec
from core.types.errors import DeployError
from core.types.request import Role


def node(
    name: str, *, labels: dict[str, str] | None = None, free: dict[str, float] | None = None, **total: float
) -> Node:
    return Node(id=name, name=name, ip="10.0.0.1", labels=labels or {}, total=total, available=free or total)


def pool(*, tensor_parallel: int = 1, labels: dict[str, str] | None = None, **resources: object) -> PoolSpec:
    return PoolSpec.model_validate(
        {"tensor_parallel": tensor_parallel, "labels": labels or {}, "resources": resources or {"cpus": 1}}
    )


def check(
    count: int, prefill: PoolSpec, nodes: list[Node], *, num_decode: int = 0, decode: PoolSpec | None = None
) -> None:
    """Check that these replicas fit."""
    pools = {Role.PREFILL: prefill, Role.DECODE: decode or pool()}
    check_fit(nodes, pools, {Role.PREFILL: count, Role.DECODE: num_decode})


def test_bundle_has_only_needed_resources() -> None:
    assert bundle(pool(cpus=0.5)) == {"CPU": 0.5}
    assert bundle(pool(cpus=2, gpus=1, custom={"rail": 1})) == {"CPU": 2, "GPU": 1, "rail": 1}


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ({}, True),
        ({"pool": "decode"}, True),
        ({"pool": "prefill"}, False),
        ({"pool": "!prefill"}, True),
        ({"pool": "in(prefill, decode)"}, True),
        ({"pool": "!in(prefill, decode)"}, False),
        ({"zone": "a"}, False),
        ({"zone": "!a"}, True),
        ({"pool": "decode", "gpu": "H100"}, False),
    ],
)
def test_labels_match_by_rays_rules(selector: dict[str, str], fits: bool) -> None:
    assert matches({"pool": "decode", "gpu": "H200"}, selector) is fits


def test_replicas_do_not_share_resources() -> None:
    nodes = [node("a", CPU=4), node("b", CPU=4, free={"CPU": 3})]
    check(3, pool(tensor_parallel=2), nodes)
    with pytest.raises(DeployError, match=r"^prefill: room for 3 of 4 replicas; each replica needs 2 CPU$"):
        check(4, pool(tensor_parallel=2), nodes)
    check(10, pool(cpus=0.1), [node("a", CPU=1)])  # fractions have Ray's precision
    check(0, pool(labels={"pool": "gpu"}), [])  # an empty pool needs nothing


def test_pools_compete_and_the_one_with_fewer_candidates_is_placed_first() -> None:
    nodes = [node("plain", CPU=1), node("labelled", labels={"pool": "decode"}, CPU=2)]
    check(2, pool(), nodes, num_decode=1, decode=pool(labels={"pool": "decode"}))
    with pytest.raises(DeployError, match=r"^decode: room for 1 of 2 replicas"):
        check(1, pool(), [node("a", CPU=2)], num_decode=2)


def test_replica_that_no_node_can_take_is_explained() -> None:
    nodes = [node("a", labels={"pool": "prefill", "zone": "z"}, CPU=8, GPU=4), node("b", CPU=8, GPU=4)]
    with pytest.raises(DeployError, match=r"^prefill: no node has the labels pool=gpu; nodes have pool=prefill$"):
        check(1, pool(labels={"pool": "gpu"}), nodes)
    with pytest.raises(
        DeployError, match=r"each replica needs 8 CPU, 8 GPU, on one node; the most .* is 8 CPU, 4 GPU$"
    ):
        check(1, pool(tensor_parallel=8, cpus=1, gpus=1), nodes)


def test_pending_reason() -> None:
    full, free = node("a", CPU=2, free={"CPU": 0.5}), node("b", CPU=2)
    assert why_pending(pool(), [full]) == "no room at present; each replica needs 1 CPU"
    assert why_pending(pool(), [full, free]) == ""
    assert "no node has the labels" in why_pending(pool(labels={"x": "y"}), [free])


def test_replicas_are_spread_over_nodes() -> None:
    nodes = [node("b", CPU=2), node("a", CPU=2), node("c", CPU=8), node("d", CPU=8, labels={"pool": "decode"})]

    def chosen(taken: dict[str, int], **labels: str) -> str | None:
        preferred = preferred_node(pool(labels=labels), nodes, taken=taken)
        return preferred and preferred.name

    # Most room.
    assert chosen({}) == "c"
    assert [chosen({"c": 1}), chosen({"c": 1, "d": 1}), chosen({"c": 1, "d": 1, "a": 1})] == ["d", "a", "b"]
    assert chosen({"a": 1, "b": 1, "c": 2, "d": 1}) == "d"
    assert chosen({"d": 3}, pool="decode") == "d"
    assert preferred_node(pool(), nodes, taken={"a": 9, "b": 9}, failures={"c": 1, "d": 2}).name == "a"
    assert preferred_node(pool(labels={"pool": "decode"}), nodes, taken={}, failures={"d": 2}).name == "d"
    assert chosen({}, pool="elsewhere") is None
    nodes[2] = node("c", free={"CPU": 0.5}, CPU=8)
    assert chosen({"a": 5, "b": 6, "d": 7}) == "a"


@pytest.mark.parametrize(
    ("cpus", "waiting", "lacking", "shared"),
    [
        (1.0, (0, 0), (9, 9), (1, 1)),
        (1.5, (0, 0), (9, 9), (3, 1)),
        (0.5, (0, 0), (9, 9), (2, 0)),
        (0.1, (0, 0), (9, 9), (0, 0)),
        (0.75, (0, 0), (1, 0), (1, 0)),
        (0.75, (0, 0), (0, 1), (0, 1)),
        (1.0, (0, 1), (9, 9), (1, 0)),
        (1.0, (4, 0), (9, 9), (0, 0)),
    ],
)
def test_growing_pools_take_turns_after_waiting_replicas(
    cpus: float, waiting: tuple[int, int], lacking: tuple[int, int], shared: tuple[int, int]
) -> None:
    """Counts of prefill and decode. Each pool gets one before any gets all; a complete pool takes no room."""
    pools = {Role.PREFILL: pool(cpus=0.25), Role.DECODE: pool(cpus=0.25, tensor_parallel=3)}
    by_role = [dict(zip(pools, counts, strict=True)) for counts in (waiting, lacking)]
    assert tuple(share_out([node("n", CPU=8.0, free={"CPU": cpus})], pools, *by_role).values()) == shared
