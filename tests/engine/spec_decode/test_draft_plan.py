"""Optimal draft lengths."""

from __future__ import annotations

import random
from itertools import product

import pytest

from engine.spec_decode.draft_plan import plan_drafts
from engine.spec_decode.step_cost import FREE, StepCost


@pytest.mark.parametrize("seed", range(30))
def test_planned_lengths_have_the_best_rate(seed: int) -> None:
    generator = random.Random(seed)
    chances = []
    for _ in range(3):
        row, chance = [], 1.0
        for _ in range(generator.randrange(5)):
            chance *= generator.random()
            row.append(chance)
        chances.append(row)
    price = StepCost(plain=1.0, token=generator.random() / 3, factors=(1 + generator.random() / 5,))
    num_rows, most = 3 + generator.randrange(4), generator.randrange(9)

    def rate(lengths: tuple[int, ...]) -> float:
        expected = sum(sum(row[:length]) for row, length in zip(chances, lengths, strict=True))
        return (num_rows + expected) / price.step(sum(lengths))

    every = product(*(range(len(row) + 1) for row in chances))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= most)
    none = num_rows / price.plain
    best = best if best > 1.01 * none else none
    found = plan_drafts(chances, num_rows, price, most)
    assert sum(found) <= most
    assert rate(tuple(found)) == pytest.approx(best)


def test_no_drafts_in_full_steps() -> None:
    """A step costs 11 + T: beside few rows a likely token pays, beside many it does not."""
    chances = [[0.7, 0.5]]
    for num_rows, pays in ((1, True), (4, True), (64, False)):
        price = StepCost(plain=11.0 + num_rows, token=1.0)
        assert any(plan_drafts(chances, num_rows, price, 100)) == pays
    assert plan_drafts([[0.01]], 1, StepCost(plain=12.0, token=1.0), 100) == [0]
    assert plan_drafts([[0.01], []], 2, FREE, 100) == [1, 0]


def test_draft_ends_before_cost_jump() -> None:
    """The thirteenth draft token is the seventeenth of its step, from which on the step takes half as long again."""
    chances = [[0.95**place for place in range(1, 17)]]
    smooth = StepCost(plain=10.0, token=0.1, num_tokens=4)
    assert plan_drafts(chances, 4, smooth, 100) == [16]
    stairs = StepCost(plain=10.0, token=0.1, num_tokens=4, factors=(1.0, 1.5, 1.5))
    assert plan_drafts(chances, 4, stairs, 100) == [12]
