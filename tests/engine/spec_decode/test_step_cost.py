"""LearnedDraftCost: factors stay within bounds, and old costs are forgotten."""

from __future__ import annotations

import math
import random

import pytest

from engine.spec_decode.step_cost import LearnedDraftCost, factor_of


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
    for _ in range(1000):
        cost.observe(4, 0.5, has_drafts=False)
    assert factor_of(cost.factors(), 4) < 1.1, "expensive drafts must be tried again"


@pytest.mark.parametrize("seed", range(4))
def test_factors_stay_within_bounds(seed: int) -> None:
    """Ratios may be extreme, for example with a clock that stood still."""
    generator, cost = random.Random(seed), LearnedDraftCost()
    for _ in range(3000):
        ratio = generator.choice([0.0, 1e-9, 0.5, 1.0, 2.0, 1e9, math.inf])
        cost.observe(generator.choice([1, 16, 17, 128, 129, 5000]), ratio, has_drafts=generator.random() < 0.5)
        assert all(0.25 <= factor <= 4.0 for factor in cost.factors())
