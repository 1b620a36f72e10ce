"""How room is shared out among pools that grow."""

from __future__ import annotations

from cluster.control.capacity import share_out
from cluster.control.placement import Node
from core.spec.loader import parse_spec
from core.types.request import Role

SPEC = parse_spec({"decode": {"tensor_parallel": 3}})  # a quarter of a processor for each rank
POOLS = {role: SPEC.pool(role) for role in Role}


def shared(cpus: float, *, waiting: tuple[int, int] = (0, 0), lacking: tuple[int, int] = (9, 9)) -> tuple[int, int]:
    """Of prefill and decode."""
    node = Node(id="n", name="n", ip="127.0.0.1", total={"CPU": 8.0}, available={"CPU": cpus})
    asked = [dict(zip(Role, counts, strict=True)) for counts in (waiting, lacking)]
    found = share_out([node], POOLS, *asked)
    return found[Role.PREFILL], found[Role.DECODE]


def test_each_begins_before_any_has_all() -> None:
    assert shared(1.0) == (1, 1) and shared(1.5) == (3, 1) and shared(0.5) == (2, 0) and shared(0.1) == (0, 0)


def test_who_lacks_none_takes_none_from_others() -> None:
    assert shared(0.75, lacking=(1, 0)) == (1, 0) and shared(0.75, lacking=(0, 1)) == (0, 1)


def test_those_that_wait_come_first() -> None:
    assert shared(1.0, waiting=(0, 1)) == (1, 0) and shared(1.0, waiting=(4, 0)) == (0, 0)
