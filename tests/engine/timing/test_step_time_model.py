"""StepTimeModel recovers a replica's timing from any mixture of steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.step_timing import StepTiming, pairs
from engine.timing.step_time_model import StepTimeModel

_TRUE = StepTiming(base_s=0.03, token_s=2e-3, pair_s=4e-7, context_s=3e-6)


def _prompts(learned: StepTimeModel, timing: StepTiming, *, number: int, noise: float = 0.0) -> None:
    draw = random.Random(1)
    for _ in range(number):
        num_tokens, after = draw.randint(1, 500), draw.choice([0, 500, 2000])
        step = {"num_tokens": num_tokens, "num_pairs": pairs(num_tokens, after=after), "num_context": 0}
        learned.add(**step, seconds=timing.step_s(**step) * draw.uniform(1 - noise, 1 + noise))


def _decodes(learned: StepTimeModel, timing: StepTiming, *, number: int, noise: float = 0.0) -> None:
    draw = random.Random(2)
    for _ in range(number):
        batch = draw.randint(1, 16)
        step = {"num_tokens": batch, "num_pairs": 0, "num_context": batch * draw.randint(100, 3000)}
        learned.add(**step, seconds=timing.step_s(**step) * draw.uniform(1 - noise, 1 + noise))


def test_no_timing_before_enough_steps() -> None:
    learned = StepTimeModel()
    _prompts(learned, _TRUE, number=7)
    assert learned.timing is None
    _prompts(learned, _TRUE, number=1)
    assert learned.timing


def test_fit_recovers_all_terms_from_noisy_steps() -> None:
    learned = StepTimeModel()
    _prompts(learned, _TRUE, number=96, noise=0.1)
    _decodes(learned, _TRUE, number=96, noise=0.1)
    assert learned.timing
    for name in ("base_s", "token_s", "pair_s", "context_s"):
        assert getattr(learned.timing, name) == pytest.approx(getattr(_TRUE, name), rel=0.25)


def test_one_sided_noise_counts_in_the_mean() -> None:
    """Every third step takes three times as long, as on a shared machine. The mean is what counts."""
    learned = StepTimeModel()
    for number in range(600):
        batch = 1 + number % 4
        step = {"num_tokens": batch, "num_pairs": 0, "num_context": batch * 100}
        learned.add(**step, seconds=_TRUE.step_s(**step) * (3 if number % 3 == 0 else 1))
        timing = learned.timing
    step = {"num_tokens": 2, "num_pairs": 0, "num_context": 200}
    assert timing and timing.step_s(**step) == pytest.approx(_TRUE.step_s(**step) * 5 / 3, rel=0.05)


def test_prompt_cost_survives_many_decode_steps() -> None:
    learned = StepTimeModel()
    _prompts(learned, _TRUE, number=96)
    _decodes(learned, _TRUE, number=5000)
    assert learned.timing
    assert learned.timing.prefill_s(400, after=0, chunk=512) == pytest.approx(
        _TRUE.prefill_s(400, after=0, chunk=512), rel=0.02
    )


def test_fit_follows_a_slower_machine() -> None:
    learned = StepTimeModel()
    slower = StepTiming(base_s=0.06, token_s=4e-3, pair_s=8e-7, context_s=6e-6)
    _decodes(learned, _TRUE, number=800)
    _decodes(learned, slower, number=800)
    assert learned.timing
    step = {"num_tokens": 8, "num_pairs": 0, "num_context": 4000}
    assert learned.timing.step_s(**step) == pytest.approx(slower.step_s(**step), rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 1000), st.floats(1e-4, 10)), min_size=8, max_size=30))
def test_no_term_is_negative(steps: list[tuple[int, int, float]]) -> None:
    learned = StepTimeModel()
    for num_tokens, num_context, seconds in steps:
        learned.add(num_tokens=num_tokens, num_pairs=num_tokens, num_context=num_context, seconds=seconds)
        timing = learned.timing
        assert timing is None or min(timing.base_s, timing.token_s, timing.pair_s, timing.context_s) >= 0
