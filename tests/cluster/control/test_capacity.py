"""Sharing of free room among growing pools."""

from __future__ import annotations

from cluster.control.placement import Node, share_out
from core.spec.loader import parse_spec
from core.types.request import Role

SPEC = parse_spec({"decode": {"tensor_parallel": 3}})  # 0.25 CPUs per rank
POOLS = {role: SPEC.pool(role) for role in Role}


def shared(cpus: float, *, waiting: tuple[int, int] = (0, 0), lacking: tuple[int, int] = (9, 9)) -> tuple[int, int]:
    """Return the counts of prefill and decode."""
    node = Node(id="n", name="n", ip="127.0.0.1", total={"CPU": 8.0}, available={"CPU": cpus})
    counts_by_role = [dict(zip(Role, counts, strict=True)) for counts in (waiting, lacking)]
    found = share_out([node], POOLS, *counts_by_role)
    return found[Role.PREFILL], found[Role.DECODE]


def test_each_pool_gets_one_before_any_gets_all() -> None:
    assert shared(1.0) == (1, 1) and shared(1.5) == (3, 1) and shared(0.5) == (2, 0) and shared(0.1) == (0, 0)


def test_complete_pool_takes_no_room() -> None:
    assert shared(0.75, lacking=(1, 0)) == (1, 0) and shared(0.75, lacking=(0, 1)) == (0, 1)


def test_waiting_replicas_come_first() -> None:
    assert shared(1.0, waiting=(0, 1)) == (1, 0) and shared(1.0, waiting=(4, 0)) == (0, 0)
