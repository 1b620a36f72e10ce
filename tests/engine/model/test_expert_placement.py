"""Expert placement: every expert is placed, no rank holds one twice, and the busiest rank has less load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.expert_parallel import busiest, plan_experts


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    counts = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24))
    ranks = draw(st.integers(1, len(counts)))
    return counts, ranks, draw(st.integers(0, min(16, (ranks - 1) * len(counts))))


@given(cases())
def test_every_place_is_taken_and_no_rank_holds_an_expert_twice(case: tuple[list[int], int, int]) -> None:
    counts, ranks, redundant = case
    placement = plan_experts(counts, ranks=ranks, redundant=redundant)
    held = sorted(expert for experts in placement for expert in experts)
    assert set(held) == set(range(len(counts))) and len(held) == len(counts) + redundant
    assert all(len(set(experts)) == len(experts) for experts in placement)
    sizes = [len(experts) for experts in placement]
    assert max(sizes) - min(sizes) <= 1
    assert placement == plan_experts(counts, ranks=ranks, redundant=redundant), (
        "every rank must compute the same placement"
    )


@pytest.mark.parametrize(
    ("counts", "ranks", "redundant", "bound"),
    [
        ([100, 1, 1, 1, 1, 1, 1, 1], 2, 2, 1.1),  # one expert has nearly all the load: both ranks hold it
        ([50, 40, 30, 20, 10, 5, 3, 2], 4, 4, 1.15),
        ([90, 80, 1, 1], 2, 0, 1.1),  # without copies, the two busy experts are on different ranks
        ([0, 0, 0, 0], 2, 2, 1.0),
    ],
)
def test_the_busiest_rank_has_little_more_than_its_share(
    counts: list[int], ranks: int, redundant: int, bound: float
) -> None:
    assert busiest(plan_experts(counts, ranks=ranks, redundant=redundant), counts) <= bound


def test_equal_counts_give_equal_sizes() -> None:
    assert [len(experts) for experts in plan_experts([1] * 8, ranks=4)] == [2, 2, 2, 2]
