"""Prediction of the length of running answers."""

from __future__ import annotations

from core.trace.traffic import SeenRequest
from planner.autoscaler.answer_lengths import answer_lengths

_ITL_S = 0.05


def _asked(count: int, *, at: float, num_tokens: int = 100, num_output: int | None = None) -> list[SeenRequest]:
    return [
        SeenRequest(
            arrival_s=at,
            num_tokens=num_tokens,
            ids=None,
            num_output=num_output,
            ttft_s=0.1,
            itl_s=None if num_output is None else _ITL_S,
        )
        for _ in range(count)
    ]


def test_short_answers_that_end_first_do_not_bias_the_estimate() -> None:
    """Answers have become long: two short ones have ended, and twenty running ones have 200 tokens each."""
    ended, running, waiting = _asked(2, at=0.0, num_output=30), _asked(20, at=90.0), _asked(1, at=100.0)
    waiting[0].ttft_s = None
    lengths = answer_lengths([*ended, *running, *waiting], now_s=100.1)
    assert lengths[:2] == [30, 30]
    assert all(length >= 400 for length in lengths[2:22])  # without longer answers to learn from: as much again
    assert lengths[22] >= 300  # and not 30, the mean of the finished ones


def test_longer_progress_raises_the_expected_length() -> None:
    ended = [*_asked(10, at=0.0, num_output=100), *_asked(10, at=1.0, num_output=300)]
    [far] = _asked(1, at=100.0 - 200 * _ITL_S)
    [near] = _asked(1, at=100.0 - 20 * _ITL_S)
    assert answer_lengths([*ended, far, near], now_s=100.1)[-2] in range(290, 311)
    assert answer_lengths([*ended, near], now_s=100.1)[-1] in range(190, 211)


def test_lengths_are_estimated_per_prompt_length_class() -> None:
    seen = [*_asked(10, at=0.0, num_output=400), *_asked(10, at=0.0, num_tokens=9000, num_output=20)]
    waiting = [*_asked(1, at=10.0), *_asked(1, at=10.0, num_tokens=9000)]
    for one in waiting:
        one.ttft_s = None
    assert answer_lengths([*seen, *waiting], now_s=10.0)[-2:] == [400, 20]
