"""Drafts as long as they pay."""

from __future__ import annotations

import random
from itertools import product

import pytest

from engine.speculation.acceptance import Acceptance, RowAcceptance
from engine.speculation.draft_plan import FREE, StepPrice, plan_drafts


@pytest.mark.parametrize("seed", range(30))
def test_no_other_lengths_give_tokens_sooner(seed: int) -> None:
    generator = random.Random(seed)
    chances = []
    for _ in range(3):
        row, chance = [], 1.0
        for _ in range(generator.randrange(5)):
            chance *= generator.random()
            row.append(chance)
        chances.append(row)
    price = StepPrice(plain=1.0, token=generator.random() / 3, drafting=1 + generator.random() / 5)
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


def test_what_fills_a_step_is_not_drafted() -> None:
    """Of a step of 11 + T: beside few rows a likely token pays, beside many none does."""
    chances = [[0.7, 0.5]]
    for num_rows, pays in ((1, True), (4, True), (64, False)):
        price = StepPrice(plain=11.0 + num_rows, token=1.0)
        assert any(plan_drafts(chances, num_rows, price, 100)) == pays
    assert plan_drafts([[0.01]], 1, StepPrice(plain=12.0, token=1.0), 100) == [0]
    assert plan_drafts([[0.01], []], 2, FREE, 100) == [1, 0]


def test_what_is_right_more_often_is_believed_more() -> None:
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.saw([3, 4], 1, 2)  # the first is right, the second is not
        acceptance.saw([5], 1, 1)
    assert acceptance.chance(3) > 0.95 and acceptance.chance(5) > 0.95 and acceptance.chance(4) < 0.05
    for _ in range(600):
        acceptance.saw([3], 0, 1)
    assert acceptance.chance(3) < 0.15, "what was true is not forgotten"


def test_a_request_of_its_own_is_known_for_it() -> None:
    better, worse = RowAcceptance(), RowAcceptance()
    assert better.factor == 1.0
    for _ in range(20):
        better.saw(0.5, 1)
        worse.saw(0.5, 0)
    assert worse.factor < 0.6 < 1.1 < better.factor
