"""A heap from which anything can be taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.open_heap import OpenHeap


class Item:
    pass


@given(st.lists(st.one_of(st.integers(0, 20), st.tuples(st.just("take"), st.integers(0, 100))), max_size=120))
def test_the_first_is_the_smallest_of_those_that_are_there(moves: list) -> None:
    heap: OpenHeap[Item] = OpenHeap()
    there: list[tuple[tuple[float, int], Item]] = []
    for number, move in enumerate(moves):
        if isinstance(move, int):
            there.append(((float(move), number), Item()))
            heap.add(*there[-1])
        elif there:
            heap.discard(there.pop(move[1] % len(there))[1])
        heap.discard(Item())  # one that is not there
        assert len(heap) == len(there)
        if there:
            assert heap.first() is min(there, key=lambda entry: entry[0])[1]
