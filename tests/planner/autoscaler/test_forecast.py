"""Forecast of the load, and the requests that replay it."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from core.trace.traffic import SeenRequest
from planner.autoscaler.forecast import answer_lengths, begin_of_the_same, forecast_load, holt, upcoming

_ITL_S = 0.05


def _requests(arrivals: list[float], *, num_tokens: int = 640, num_output: int | None = 50) -> list[SeenRequest]:
    return [
        SeenRequest(arrival_s=when, num_tokens=num_tokens, ids=tuple(range(10)), num_output=num_output)
        for when in arrivals
    ]


def test_holt_keeps_a_level_and_damps_a_trend() -> None:
    assert holt([5.0] * 12, steps=4) == (5.0, 0.0)
    rising, _ = holt([float(i) for i in range(12)], steps=4)
    assert 10.0 < rising < 15.0
    assert holt([9.0, 6.0, 3.0, 0.0, 0.0, 0.0], steps=20)[0] >= 0.0


def test_noise_does_not_change_the_forecast() -> None:
    draw = random.Random(7)
    arrivals = sorted(draw.uniform(0, 180) for _ in range(400))
    requests = _requests(arrivals)
    found = forecast_load(requests, [50] * 400, begin_s=0.0, first=0, now_s=180.0, ahead_s=60.0)
    assert found.ahead.rate == pytest.approx(found.seen.rate, rel=0.12)
    assert found.ahead[1:] == (640, 50)


def test_a_doubled_rate_is_detected_within_a_minute_and_bounded() -> None:
    slow, fast = [i * 1.0 for i in range(120)], [120 + i * 0.25 for i in range(240)]
    requests = _requests(slow + fast)
    found = forecast_load(requests, [50] * len(requests), begin_s=0.0, first=0, now_s=180.0, ahead_s=60.0)
    assert found.seen.rate == pytest.approx(2.0)
    assert 2.8 < found.ahead.rate <= 4.0


def test_replayed_trace_matches_the_forecast_and_keeps_prefixes() -> None:
    requests = _requests([i * 0.5 for i in range(200)] + [100 + i * 0.25 for i in range(320)])
    answers = [50] * len(requests)
    found = forecast_load(requests, answers, begin_s=0.0, first=0, now_s=180.0, ahead_s=60.0)
    trace = upcoming(requests, answers, found)
    assert (len(trace) - 1) / trace[-1].arrival_s == pytest.approx(found.ahead.rate, rel=0.02)
    assert fmean(request.num_tokens for request in trace) == pytest.approx(found.ahead.prompt, rel=0.01)
    assert all(request.ids and request.ids[:10] == tuple(range(10))[: len(request.ids)] for request in trace)
    assert all(len(request.ids or ()) * request.tokens_per_id >= request.num_tokens for request in trace)


def test_replay_window_ends_where_the_traffic_changes() -> None:
    draw = random.Random(11)

    def some(begin_s: float, end_s: float, rate: float, mean: int) -> list[SeenRequest]:
        count = int(rate * (end_s - begin_s))
        arrivals = sorted(draw.uniform(begin_s, end_s) for _ in range(count))
        return [
            SeenRequest(arrival_s=when, num_tokens=max(1, round(draw.expovariate(1 / mean))), ids=None)
            for when in arrivals
        ]

    same = some(0, 180, 3.0, 800)
    assert begin_of_the_same(same, now_s=180.0) == 0
    turned = [*some(0, 150, 2.0, 8000), *some(150, 180, 4.0, 300)]
    assert turned[begin_of_the_same(turned, now_s=180.0)].arrival_s >= 149.0
    quicker = [*some(0, 150, 1.0, 800), *some(150, 180, 6.0, 800)]
    assert quicker[begin_of_the_same(quicker, now_s=180.0)].arrival_s >= 149.0
    assert begin_of_the_same(some(0, 180, 0.05, 800), now_s=180.0) == 0


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
    assert answer_lengths(waiting[:1], now_s=11.0) == [1]
