"""Optimal draft lengths, and what they are computed from: learned costs, acceptance rates, yields."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from core.rpc import worker_pb2 as pb
from core.wire.messages import make_plausible
from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance_rates import (
    AcceptanceRate,
    AcceptanceTracker,
    RatedProposal,
    RowYield,
    SequenceFactor,
)
from engine.spec_decode.draft_plan import plan_drafts
from engine.spec_decode.proposer import Proposal
from engine.spec_decode.step_cost import FREE, LearnedDraftCost, StepCost, factor_of
from tests.engine.spec_decode.proposers import sequence_of


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


def test_unused_bucket_forgets_its_cost() -> None:
    cost = LearnedDraftCost()
    for _ in range(200):
        cost.observe(4, 1.0, has_drafts=False)
        cost.observe(12, 1.0, has_drafts=True)
        cost.observe(20, 1.8, has_drafts=True)
    assert factor_of(cost.factors(), 20) > 1.6
    for _ in range(1500):
        cost.observe(12, 1.0, has_drafts=True)
    assert factor_of(cost.factors(), 20) < 1.25


def test_plain_steps_update_factors() -> None:
    """Plain steps take half the expected time, so a step with a draft that takes the expected time is twice as
    expensive."""
    cost = LearnedDraftCost()
    assert factor_of(cost.factors(), 4) == 1.0
    for _ in range(200):
        cost.observe(4, 0.5, has_drafts=False)
        cost.observe(4, 1.0, has_drafts=True)
    assert factor_of(cost.factors(), 4) > 1.8
    for _ in range(250):
        cost.observe(4, 0.5, has_drafts=False, num_steps=16)
    assert factor_of(cost.factors(), 4) < 1.1, "expensive drafts must be tried again"


@pytest.mark.parametrize("seed", range(4))
def test_factors_stay_within_bounds(seed: int) -> None:
    """Ratios may be extreme, for example with a clock that stood still."""
    generator, cost = random.Random(seed), LearnedDraftCost()
    for _ in range(3000):
        ratio = generator.choice([0.0, 1e-9, 0.5, 1.0, 2.0, 1e9, math.inf])
        cost.observe(generator.choice([1, 16, 17, 128, 129, 5000]), ratio, has_drafts=generator.random() < 0.5)
        assert all(0.25 <= factor <= 4.0 for factor in cost.factors())


def _tracker(*methods: str) -> AcceptanceTracker:
    return AcceptanceTracker(methods, max_tokens=8, vocab_size=50)


def _best(tracker: AcceptanceTracker, sequence: Sequence) -> RatedProposal:
    proposal = tracker.best(sequence)
    assert proposal
    return proposal


def test_sequence_factor_applies_to_its_sequence() -> None:
    tracker, known, other = _tracker("one"), sequence_of([1, 2]), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5])
    for _ in range(200):
        for sequence, tokens in ((known, [3, 4]), (other, [9, 9])):
            tracker.learn([sequence])
            tracker.note("one", sequence, proposal)
            sequence.tokens += tokens
    for sequence in (known, other):
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
    assert _best(tracker, other).chances[0] < _best(tracker, known).chances[0] / 4


def test_proposal_is_cut_before_invalid_token() -> None:
    tracker, sequence = _tracker("one"), sequence_of([1, 2])
    for tokens, valid in (([3, 50, 8], [3]), ([3, -1], [3]), ([4] * 20, [4] * 8)):
        tracker.note("one", sequence, Proposal(tokens, [5] * len(tokens)))
        assert list(_best(tracker, sequence).tokens) == valid


def test_acceptance_rate_follows_outcomes() -> None:
    acceptance = AcceptanceRate()
    for _ in range(300):
        acceptance.observe([3, 4], 1)  # the first is right, the second is not
        acceptance.observe([5], 1)
    assert acceptance.rates[3] > 0.95 and acceptance.rates[5] > 0.95 and acceptance.rates[4] < 0.05
    for _ in range(600):
        acceptance.observe([3], 0)
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


def test_yield_of_old_drafts_fades_to_zero() -> None:
    found = RowYield()
    assert (found.tokens_per_row, found.drafted_per_row) == (0.0, 0.0)
    found.add(1, num_tokens=3, num_drafted=4)
    assert (found.tokens_per_row, found.drafted_per_row) == (3.0, 4.0)
    for _ in range(2000):
        found.add(16, num_tokens=16, num_drafted=0)
        assert make_plausible(pb.Status(tokens_per_row=found.tokens_per_row, drafted_per_row=found.drafted_per_row))
    assert found.drafted_per_row == 0.0 and abs(found.tokens_per_row - 1.0) < 1e-6
