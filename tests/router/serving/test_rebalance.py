"""Rebalancing rules: source and target of the next move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.serving.rebalance import DecodeLoad, next_move


def _loads(*counts: int) -> list[DecodeLoad]:
    return [DecodeLoad(f"decode-{i}", count) for i, count in enumerate(counts)]


def test_a_new_replica_gets_streams_from_the_fullest() -> None:
    assert next_move(_loads(3, 8, 0)) == ("decode-1", "decode-2")


def test_small_gaps_cause_no_moves() -> None:
    assert next_move([]) is None
    assert next_move(_loads(8)) is None
    assert next_move(_loads(3, 0)) is None
    assert next_move(_loads(100, 80)) is None


@given(st.lists(st.integers(0, 300), max_size=6), st.integers(1, 3))
def test_rebalancing_terminates_and_evens_out_the_load(counts: list[int], num_routers: int) -> None:
    """Holds also if several routers see the same load and each moves one stream."""
    loads, num_moves = _loads(*counts), 0
    while move := next_move(loads):
        source, target = move
        change = {source: -num_routers, target: num_routers}
        loads = [DecodeLoad(load.replica, load.num_streams + change.get(load.replica, 0)) for load in loads]
        num_moves += 1
        assert num_moves <= sum(counts)
    final = [load.num_streams for load in loads]
    assert sum(final) == sum(counts) and min(final, default=0) >= 0
    assert max(final, default=0) - min(final, default=0) < max(4, 0.25 * max(final, default=0))
