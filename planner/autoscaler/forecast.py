"""Forecast of the load, and the requests that replay it.

Answers. Among recent requests, short answers finish first. So the mean of the finished ones would drop whenever answers
get longer. The estimate of Kaplan and Meier (1958) also counts running answers, as "longer than n so far". It gives
S(n), the share of answers with more than n tokens. A request with n tokens is expected to reach
n + (the sum of S beyond n) / S(n).

Load. Holt's damped linear trend over arrival rate, prompt lengths and answer lengths:

level[t] = a · x[t] + (1 - a) · (level[t-1] + d · trend[t-1])      Holt 1957; damped: Gardner and McKenzie 1985
trend[t] = b · (level[t] - level[t-1]) + (1 - b) · d · trend[t-1]
x[t + h] = level[t] + (d + d² + … + d^h) · trend[t]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import NamedTuple

from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest

_LEVEL, _TREND, _DAMPING = 0.4, 0.2, 0.8
_CHANCE = 1.5  # standard errors by which a forecast change is reduced
_NUM_PARTS = 12  # observations per window
_SHORTEST_S, _ENOUGH = 15.0, 20  # minimum seconds and requests of the recent traffic that counts as one kind
_FEW = 3  # with fewer older requests, no difference is tested
_SURE = 3.5  # significance threshold, in standard errors
_MAX_RATIO = 2.0  # maximum ratio between forecast and observation, either way
_OWN_IDS = 1 << 50  # ids from here on are unique to one request
_LAST_KNOWN = 40  # latest requests per prompt length class
_LAST_PACES = 200  # latest requests over which the pace of tokens is averaged

_Curve = list[tuple[int, float]]  # (n, share of answers longer than n), ascending


class Load(NamedTuple):
    """Mean rate and lengths of requests."""

    rate: float  # requests per second
    prompt: float  # tokens
    answer: float


@dataclass(frozen=True)
class LoadForecast:
    """Load as observed lately, and as forecast."""

    seen: Load
    ahead: Load

    @property
    def pace(self) -> float:
        """Ratio of the forecast time between arrivals to the observed one."""
        return self.seen.rate / self.ahead.rate if self.ahead.rate else 1.0

    def __str__(self) -> str:
        seen, ahead = self.seen, self.ahead
        return (
            f"{seen.rate:.2f} requests/s of {seen.prompt:,.0f} + {seen.answer:,.0f} tokens, going to "
            f"{ahead.rate:.2f} of {ahead.prompt:,.0f} + {ahead.answer:,.0f}"
        )


def holt(values: Sequence[float], *, steps: int) -> tuple[float, float]:
    """Return the forecast `steps` >= 1 steps after the last value, at least 0, and its standard error.

    The error is estimated from the one-step forecasts within the series.
    """
    level, trend, misses = values[0], 0.0, [0.0]
    for value in values[1:]:
        before, expected = level, level + _DAMPING * trend
        misses.append(value - expected)
        level = _LEVEL * value + (1 - _LEVEL) * expected
        trend = _TREND * (level - before) + (1 - _TREND) * _DAMPING * trend
    reach = sum(_DAMPING**step for step in range(1, steps + 1))
    error = math.sqrt(fmean(miss * miss for miss in misses) * _LEVEL / (2 - _LEVEL))
    return max(0.0, level + reach * trend), error


def begin_of_the_same(requests: Sequence[SeenRequest], *, now_s: float) -> int:
    """Return the index of the first request of the current kind of traffic, judged by rate and prompt lengths.

    The window reaches back from now and doubles until the older traffic differs significantly.
    """
    arrivals = [request.arrival_s for request in requests]
    width_s = _SHORTEST_S
    first = bisect_left(arrivals, now_s - width_s)
    while len(requests) - first < _ENOUGH and first:
        width_s *= 2
        first = bisect_left(arrivals, now_s - width_s)
    while first:
        before = bisect_left(arrivals, now_s - 2 * width_s)
        older_s = now_s - width_s - max(now_s - 2 * width_s, arrivals[0])
        if _differ(requests[before:first], older_s, requests[first:], width_s):
            break
        width_s, first = 2 * width_s, before
    return first


def _differ(older: Sequence[SeenRequest], older_s: float, newer: Sequence[SeenRequest], newer_s: float) -> bool:
    """Test for a significant difference: of two Poisson rates, and of log prompt lengths (Welch's test)."""
    if len(older) < _FEW:
        return False
    rate_error = math.sqrt(len(older) / older_s**2 + len(newer) / newer_s**2)
    if abs(len(older) / older_s - len(newer) / newer_s) > _SURE * rate_error:
        return True
    logs = [[math.log(max(1, r.num_tokens)) for r in some] for some in (older, newer)]
    length_error = math.sqrt(sum(variance(some) / len(some) for some in logs))
    return abs(fmean(logs[0]) - fmean(logs[1])) > _SURE * length_error


def forecast_load(
    requests: Sequence[SeenRequest], answers: Sequence[int], *, begin_s: float, first: int, now_s: float, ahead_s: float
) -> LoadForecast:
    """Forecast the load ahead_s after now_s.

    requests: at least one, arrived from begin_s to now_s, in this order. answers: answer length of each in tokens.
    first: index of the first request of the part that gives the observed means.
    """
    part_s = (now_s - begin_s) / _NUM_PARTS
    arrivals = [request.arrival_s for request in requests]
    bounds = [bisect_left(arrivals, begin_s + part * part_s) for part in range(_NUM_PARTS)] + [len(requests)]
    series: list[list[float]] = [[], [], []]  # of rates, and of mean lengths of prompts and answers
    for low, high in pairwise(bounds):
        series[0].append((high - low) / part_s)
        if high > low:  # an empty part has no lengths
            series[1].append(fmean(r.num_tokens for r in requests[low:high]))
            series[2].append(fmean(answers[low:high]))
    seen = Load(
        rate=(len(requests) - first) / (now_s - arrivals[first]),
        prompt=fmean(r.num_tokens for r in requests[first:]),
        answer=fmean(answers[first:]),
    )
    steps = max(1, round(ahead_s / part_s))
    return LoadForecast(
        seen, Load(*(_expected(one, mean, steps=steps) for one, mean in zip(series, seen, strict=True)))
    )


def upcoming(requests: Sequence[SeenRequest], answers: Sequence[int], forecast: LoadForecast) -> list[TraceRequest]:
    """Return the requests as a trace scaled to the forecast: arrival rate, prompt lengths and answer lengths.

    A lengthened prompt keeps its prefix and gets a unique suffix.
    """
    seen, ahead = forecast.seen, forecast.ahead
    longer, wordier = ahead.prompt / seen.prompt, ahead.answer / seen.answer
    begin_s = requests[0].arrival_s
    return [
        trace_request(
            request,
            number=number,
            arrival_s=(request.arrival_s - begin_s) * forecast.pace,
            num_tokens=max(1, round(request.num_tokens * longer)),
            num_output=max(1, round(answer * wordier)),
        )
        for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def trace_request(
    seen: SeenRequest, *, number: int, arrival_s: float, num_tokens: int, num_output: int
) -> TraceRequest:
    """Convert an observed request for the simulator. A longer prompt gets a unique suffix."""
    ids = seen.ids
    if ids is not None:
        num_ids = -(-num_tokens // seen.tokens_per_id)
        first = _OWN_IDS + (number << 24)
        ids = (*ids[:num_ids], *range(first, first + num_ids - len(ids)))
    return TraceRequest(
        number=number,
        arrival_s=arrival_s,
        num_tokens=num_tokens,
        num_output=num_output,
        ids=ids,
        tokens_per_id=seen.tokens_per_id,
    )


def _expected(series: Sequence[float], seen: float, *, steps: int) -> float:
    """Forecast a series, shrunk towards the observed value by its error and limited to _MAX_RATIO of it."""
    forecast, error = holt(series, steps=steps)
    change = forecast - seen
    forecast = seen + math.copysign(max(0.0, abs(change) - _CHANCE * error), change)
    return min(max(forecast, seen / _MAX_RATIO), seen * _MAX_RATIO)


def tokens_so_far(requests: Sequence[SeenRequest], *, now_s: float) -> list[int]:
    """Return the current answer length of each request; running ones are estimated from the recent token rate."""
    itl_s = fmean([r.itl_s for r in requests[-_LAST_PACES:] if r.itl_s] or [1.0])
    return [
        r.num_output
        if r.num_output is not None
        else 0
        if r.ttft_s is None
        else 1 + max(0, int((now_s - r.arrival_s - r.ttft_s) / itl_s))
        for r in requests
    ]


def answer_lengths(requests: Sequence[SeenRequest], *, now_s: float) -> list[int]:
    """Return the actual or predicted answer length of each request, at least 1.

    requests: in order of arrival.
    """
    so_far = tokens_so_far(requests, now_s=now_s)
    kinds: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    for request, count in zip(requests, so_far, strict=True):
        if count:
            kinds[request.num_tokens.bit_length()].append((count, request.is_over))
    usual = _longer([one for some in kinds.values() for one in some])
    curves = {kind: _longer(some[-_LAST_KNOWN:]) for kind, some in kinds.items() if any(is_over for _, is_over in some)}
    return [
        max(1, count if r.is_over else round(_expected_length(curves.get(r.num_tokens.bit_length(), usual), count)))
        for r, count in zip(requests, so_far, strict=True)
    ]


def _longer(known: Sequence[tuple[int, bool]]) -> _Curve:
    """Compute the Kaplan-Meier curve. known: (tokens, answer is complete) per request."""
    curve, share, left = [(0, 1.0)], 1.0, len(known)
    for count, is_over in sorted(known, key=lambda one: (one[0], not one[1])):
        if is_over:
            share *= 1 - 1 / left
        left -= 1
        curve.append((count, share))
    return curve


def _expected_length(curve: _Curve, count: int) -> float:
    """Return the expected length of an answer with `count` tokens.

    Beyond the longest known answer, or if that one is still running, as many tokens again are expected.
    """
    last, rest = curve[-1]
    at = next((share for n, share in reversed(curve) if n <= count), 1.0)
    if count >= last or at <= 0:
        return 2.0 * count
    beyond = sum(
        share * (after - max(before, count)) for (before, share), (after, _) in pairwise(curve) if after > count
    )
    return count + (beyond + rest * last) / at
