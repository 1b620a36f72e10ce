"""Attribution of time to steps, and the timing that is learned from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.step_timing import StepTiming, pairs
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.spec_decode.step_cost import factor_of
from engine.timing import pace
from engine.timing.pace import Pace
from engine.timing.step_time_model import StepTimeModel


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def _batch(*counts: int) -> Batch:
    rows = [Row(token_ids=[1] * count, start=0, blocks=[i], num_logits=1) for i, count in enumerate(counts)]
    return Batch.of(rows, block_size=64)


def _step(
    pace: Pace, clock: Clock, seconds: float, *counts: int, has_prompts: bool = False, has_drafts: bool = False
) -> None:
    pace.begin()
    clock.now += seconds
    pace.end(_batch(*counts), has_prompts=has_prompts, has_drafts=has_drafts)


def test_pace_learns_overhead_of_drafts(clock: Clock) -> None:
    pace = Pace()
    for _ in range(100):
        for count in (1, 2, 3, 4):
            _step(pace, clock, 0.10 + 0.01 * count, *[1] * count)
            _step(pace, clock, 0.10 + 0.01 * count, count, has_drafts=True)
    assert pace.draft_factors == pytest.approx([1.0] * 8, abs=0.02)
    for _ in range(100):
        for count in (1, 2, 3, 4):
            _step(pace, clock, 0.10 + 0.01 * count, *[1] * count)
            _step(pace, clock, 0.15 + 0.015 * count, count, has_drafts=True)
    assert pace.draft_factors == pytest.approx([1.5] * 8, abs=0.1)
    for _ in range(300):
        for count in (1, 2, 3, 4):
            _step(pace, clock, 0.10 + 0.01 * count, *[1] * count)
            _step(pace, clock, 0.05 + 0.005 * count, count, has_drafts=True)
    assert pace.draft_factors == pytest.approx([1.0] * 8, abs=0.05), "drafts must never look free"


def test_pace_learns_jump_of_draft_cost(clock: Clock) -> None:
    pace = Pace()
    for _ in range(100):
        _step(pace, clock, 0.10, 1)
        for count in (4, 12, 20, 28):
            _step(pace, clock, 0.10 if count <= 16 else 0.15, count, has_drafts=True)
    few, many = factor_of(pace.draft_factors, 16), factor_of(pace.draft_factors, 17)
    assert many > 1.1 * few, "expected a higher factor beyond the jump"
    assert few < factor_of(pace.draft_factors, 500) < many, "an unseen bucket must have the mean of all"


def test_decode_and_prompt_steps_are_counted_separately(clock: Clock) -> None:
    pace = Pace()
    _step(pace, clock, 9.0, 1)  # the first step also loads kernels
    assert (pace.decode_step_s, pace.prompt_tokens_per_s, pace.timing) == (0.0, 0.0, None)
    _step(pace, clock, 0.5, 1, 1, 1)
    _step(pace, clock, 2.0, 40, 1, has_prompts=True)
    _step(pace, clock, 0.5, 9, 1)  # forced tokens
    assert pace.decode_step_s == pytest.approx(0.5)
    assert pace.prompt_tokens_per_s == pytest.approx(41 / 2.0)
    assert pace.timing is None, "three steps do not determine four terms"
    for _ in range(8):
        _step(pace, clock, 0.5, 1)
    assert pace.timing is not None


def test_time_between_steps_counts_unless_idle(clock: Clock) -> None:
    pace = Pace()
    for _ in range(2):
        _step(pace, clock, 1.0, 1)
    clock.now += 1.0  # sampling, sending tokens
    _step(pace, clock, 1.0, 1)
    busy = pace.decode_step_s
    assert 1.0 < busy < 2.0
    pace.rest()
    clock.now += 1000.0
    _step(pace, clock, 1.0, 1)
    assert pace.decode_step_s < busy


class FakeDevice:
    """Device that does launched work when the test lets it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks: list[FakeMark] = []  # events not reached yet

    def mark(self) -> FakeMark:
        self.marks.append(FakeMark())
        return self.marks[-1]

    def work(self, seconds: float) -> None:
        """Work up to the next event."""
        self.now += seconds
        self.marks.pop(0).at = self.now


class FakeMark:
    """Implements engine.timing.pace.StepEvent."""

    at: float | None = None

    @property
    def is_past(self) -> bool:
        return self.at is not None

    def seconds_since(self, earlier: FakeMark) -> float:
        assert self.at is not None and earlier.at is not None, "an event that is not past would block"
        return self.at - earlier.at


def test_async_chunks_are_timed_by_the_device(clock: Clock) -> None:
    device = FakeDevice()
    pace = Pace(device.mark)
    for count in (40, 60, 50):  # launched at once
        _step(pace, clock, 1e-4, count, has_prompts=True)
    assert pace.prompt_tokens_per_s == 0, "no step is complete yet"
    device.work(7.0)  # the event before the first step: earlier work is not part of it
    device.work(2.0)
    device.work(3.0)
    assert pace.prompt_tokens_per_s == 0
    _step(pace, clock, 1e-4, 10, has_prompts=True)  # the first two are seen to be complete
    weighed = 40 * 0.8 + 60, 2.0 * 0.8 + 3.0
    assert pace.prompt_tokens_per_s == pytest.approx(weighed[0] / weighed[1])


def test_idle_device_time_is_not_counted(clock: Clock) -> None:
    device = FakeDevice()
    pace = Pace(device.mark)
    _step(pace, clock, 1e-4, 1)
    device.work(0.0)
    device.work(0.5)
    pace.rest()
    pace.begin()
    device.work(100.0)  # the step is launched after a while
    pace.end(_batch(1), has_prompts=False)
    device.work(0.5)
    _step(pace, clock, 1e-4, 1)
    assert pace.decode_step_s == pytest.approx(0.5)


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
