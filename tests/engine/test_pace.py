"""Which seconds count for which steps."""

from __future__ import annotations

import pytest

from engine import pace
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.pace import Pace


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


def _step(pace: Pace, clock: Clock, seconds: float, *counts: int, has_prompts: bool = False) -> None:
    pace.begin()
    clock.now += seconds
    pace.end(_batch(*counts), has_prompts=has_prompts)


def test_steps_that_only_decode_and_those_that_compute_prompts_are_told_apart(clock: Clock) -> None:
    pace = Pace()
    assert (pace.decode_step_s, pace.prompt_tokens_per_s, pace.timing) == (0.0, 0.0, None)
    _step(pace, clock, 0.5, 1, 1, 1)
    _step(pace, clock, 2.0, 40, 1, has_prompts=True)
    _step(pace, clock, 0.5, 9, 1)  # tokens that were known
    assert pace.decode_step_s == pytest.approx(0.5)
    assert pace.prompt_tokens_per_s == pytest.approx(41 / 2.0)
    assert pace.timing is not None


def test_what_lies_between_two_steps_counts_unless_there_was_nothing_to_do(clock: Clock) -> None:
    pace = Pace()
    _step(pace, clock, 1.0, 1)
    clock.now += 1.0  # sampling, sending tokens
    _step(pace, clock, 1.0, 1)
    busy = pace.decode_step_s
    assert 1.0 < busy < 2.0
    pace.rest()
    clock.now += 1000.0
    _step(pace, clock, 1.0, 1)
    assert pace.decode_step_s < busy
