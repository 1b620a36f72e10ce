"""Optimal draft lengths and branches."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import product

import pytest

from engine.spec_decode.acceptance import AcceptanceRate, SequenceFactor
from engine.spec_decode.draft_plan import BranchOffer, plan_drafts, plan_tree
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


@pytest.mark.parametrize("seed", range(60))
def test_planned_branches_have_the_best_rate(seed: int) -> None:
    """In a step with room for all of them."""
    generator = random.Random(seed)

    def falling(chance: float, length: int) -> list[float]:
        found = []
        for _ in range(length):
            chance *= generator.random()
            found.append(chance)
        return found

    chances = [falling(1.0, generator.randrange(1, 4)) for _ in range(2)]
    price = StepCost(plain=1.0, token=generator.random() / 8, context=generator.random() / 500)
    offers = []
    for _ in range(2):
        row = generator.randrange(2)
        place = generator.randrange(len(chances[row]))
        before = [1.0, *chances[row]]
        first = falling(before[place] - chances[row][place], generator.randrange(1, 4))
        offers.append(BranchOffer(row, place, first, 1 + place, price.fork(generator.randrange(40))))

    def rate(lengths: tuple[int, ...]) -> float:
        drafts, branches = lengths[:2], lengths[2:]
        expected = sum(sum(row[:length]) for row, length in zip(chances, drafts, strict=True))
        cost = float(sum(drafts))
        for offer, length in zip(offers, branches, strict=True):
            expected += sum(offer.chances[:length])
            cost += (offer.num_again + offer.fork + length) * (length > 0)
        return (2 + expected) / price.step(cost)

    every = product(*(range(len(row) + 1) for row in (*chances, *(offer.chances for offer in offers))))
    best = max(rate(lengths) for lengths in every if _is_connected(offers, lengths[:2], lengths[2:]))
    best = best if best > 1.01 * 2 else 2.0
    plan = plan_tree(chances, offers, 2, price, 100)
    assert _is_connected(offers, plan.lengths, plan.branches)
    assert rate((*plan.lengths, *plan.branches)) == pytest.approx(best)


def _is_connected(offers: Seq[BranchOffer], lengths: Seq[int], branches: Seq[int]) -> bool:
    """Return True if every branch has the draft tokens before it."""
    pairs = zip(offers, branches, strict=True)
    return all(not length or offer.place <= lengths[offer.row] for offer, length in pairs)


def test_branch_pays_for_recomputed_tokens_and_context() -> None:
    """It pays beside one row of a small model, but not with a long context or beside many rows."""
    price = StepCost(plain=12.0, token=0.9, context=0.001)

    def taken(num_rows: int, num_context: int, place: int = 0) -> int:
        one = BranchOffer(0, place, [0.3, 0.3, 0.3], 1 + place, price.fork(num_context))
        return plan_tree([[0.6] * 3] * num_rows, [one], num_rows, price, 64).branches[0]

    assert taken(1, 100) == 3 and taken(1, 20_000) == 0 and taken(8, 100) == 0
    assert taken(1, 100, place=12) == 0


@pytest.mark.parametrize("room", range(9))
def test_branches_stay_within_room(room: int) -> None:
    offers = [BranchOffer(0, 0, [0.3, 0.2], 2, 0.0), BranchOffer(0, 1, [0.3], 3, 0.0)]
    plan = plan_tree([[0.5, 0.4]], offers, 1, FREE, room)
    again = sum(offer.num_again for offer, length in zip(offers, plan.branches, strict=True) if length)
    assert again + sum(plan.lengths) + sum(plan.branches) <= room
    if room >= 6:
        assert plan.lengths == [2] and plan.branches[0] == 2


def test_no_drafts_in_full_steps() -> None:
    """A step costs 11 + T: beside few rows a likely token pays, beside many it does not."""
    chances = [[0.7, 0.5]]
    for num_rows, pays in ((1, True), (4, True), (64, False)):
        price = StepCost(plain=11.0 + num_rows, token=1.0)
        assert any(plan_drafts(chances, num_rows, price, 100)) == pays
    assert plan_drafts([[0.01]], 1, StepCost(plain=12.0, token=1.0), 100) == [0]
    assert plan_drafts([[0.01], []], 2, FREE, 100) == [1, 0]


def test_acceptance_rate_follows_outcomes() -> None:
    acceptance = AcceptanceRate()
    for _ in range(300):
        acceptance.observe([3, 4], 1, 2)  # the first is right, the second is not
        acceptance.observe([5], 1, 1)
    assert acceptance.rates[3] > 0.95 and acceptance.rates[5] > 0.95 and acceptance.rates[4] < 0.05
    for _ in range(600):
        acceptance.observe([3], 0, 1)
    assert acceptance.rates[3] < 0.15, "old outcomes must be forgotten"


def test_sequence_factor_follows_outcomes() -> None:
    better, worse = SequenceFactor(), SequenceFactor()
    assert better.value == 1.0
    for _ in range(20):
        better.observe(0.5, 1)
        worse.observe(0.5, 0)
    assert worse.value < 0.2 and better.value > 1.1
    for _ in range(20):
        worse.observe(0.05, 1)
    assert worse.value > 1.1, "the factor must follow a change"


def test_draft_ends_before_cost_jump() -> None:
    """The thirteenth draft token is the seventeenth of its step, from which on the step takes half as long again."""
    chances = [[0.95**place for place in range(1, 17)]]
    smooth = StepCost(plain=10.0, token=0.1, num_tokens=4)
    assert plan_drafts(chances, 4, smooth, 100) == [16]
    stairs = StepCost(plain=10.0, token=0.1, num_tokens=4, factors=(1.0, 1.5, 1.5))
    assert plan_drafts(chances, 4, stairs, 100) == [12]
