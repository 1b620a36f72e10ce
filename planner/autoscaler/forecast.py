"""What the load will be: Holt's linear trend, damped, over arrivals, prompt lengths and answer lengths.

level[t] = a · x[t] + (1 - a) · (level[t-1] + d · trend[t-1])      Holt 1957; damped: Gardner and McKenzie 1985
trend[t] = b · (level[t] - level[t-1]) + (1 - b) · d · trend[t-1]
x[t + h] = level[t] + (d + d² + … + d^h) · trend[t]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, variance

from core.trace.trace import TraceRequest
from core.trace.traffic import SeenRequest

_LEVEL, _TREND, _DAMPING = 0.4, 0.2, 0.8
_CHANCE = 1.5  # standard errors
_NUM_PARTS = 12  # of the window: each is one observation of the series
_SHORTEST_S, _ENOUGH, _FEW = 15.0, 20, 3  # of what is taken for one kind: seconds, requests, and to differ from it
_SURE = 3.5  # standard errors: beyond that it is no chance
_MOST_RATIO = 2.0  # of what is forecast to what was seen, either way
_OWN_IDS = 1 << 50  # ids from here on are nobody else's


@dataclass(frozen=True, kw_only=True)
class LoadForecast:
    """Means; `seen_` of the window, the others of the time that is decided for."""

    seen_rate: float  # requests a second
    seen_prompt: float  # tokens
    seen_answer: float
    rate: float
    prompt: float
    answer: float

    @property
    def pace(self) -> float:
        """How long it takes until as many come as came in a second."""
        return self.seen_rate / self.rate if self.rate else 1.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.seen_rate:.2f} requests/s of {self.seen_prompt:,.0f} + {self.seen_answer:,.0f} tokens, going to "
            f"{self.rate:.2f} of {self.prompt:,.0f} + {self.answer:,.0f}"
        )


def holt(values: Sequence[float], *, steps: int) -> tuple[float, float]:
    """What the series will be so many steps after its last value, which is at least one; never below 0. And its
    standard error, by how far the value after each was from what was forecast of it."""
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
    """The first of the last requests that are of one kind, by their rate and the lengths of their prompts: from the
    last few seconds back, twice as far each time, until what is further back differs by more than chance."""
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
    """Welch's test of the lengths' logarithms, and the same of two Poisson rates."""
    if len(older) < _FEW:
        return False
    rate_error = math.sqrt(len(older) / older_s**2 + len(newer) / newer_s**2)
    if abs(len(older) / older_s - len(newer) / newer_s) > _SURE * rate_error:
        return True
    logs = [[math.log(max(1, r.num_tokens)) for r in some] for some in (older, newer)]
    length_error = math.sqrt(sum(variance(some) / len(some) for some in logs))
    return abs(fmean(logs[0]) - fmean(logs[1])) > _SURE * length_error


def forecast_load(
    requests: Sequence[SeenRequest],
    answers: Sequence[int],
    *,
    begin_s: float,
    shape_s: float,
    now_s: float,
    ahead_s: float,
) -> LoadForecast:
    """Of requests that arrived from begin_s to now_s, in this order; at least one. answers: tokens of each. What is
    forecast is told beside what was seen from shape_s on."""
    part_s = (now_s - begin_s) / _NUM_PARTS
    arrivals = [request.arrival_s for request in requests]
    bounds = [bisect_left(arrivals, begin_s + part * part_s) for part in range(_NUM_PARTS)] + [len(requests)]
    first = bisect_left(arrivals, shape_s)
    seen_prompt, seen_answer = fmean(r.num_tokens for r in requests[first:]), fmean(answers[first:])
    rates: list[float] = []
    prompts, lengths = [], []
    for low, high in pairwise(bounds):
        rates.append((high - low) / part_s)
        if high > low:  # in the others nothing was seen of lengths
            prompts.append(fmean(r.num_tokens for r in requests[low:high]))
            lengths.append(fmean(answers[low:high]))
    steps = max(1, round(ahead_s / part_s))
    seen_rate = (len(requests) - first) / (now_s - shape_s)
    return LoadForecast(
        seen_rate=seen_rate,
        seen_prompt=seen_prompt,
        seen_answer=seen_answer,
        rate=_expected(rates, seen_rate, steps=steps),
        prompt=_expected(prompts, seen_prompt, steps=steps),
        answer=_expected(lengths, seen_answer, steps=steps),
    )


def upcoming(requests: Sequence[SeenRequest], answers: Sequence[int], forecast: LoadForecast) -> list[TraceRequest]:
    """These requests again, as they are forecast: so much closer together, so much longer or shorter. A prompt keeps
    its prefix; what it is longer by is nobody else's."""
    longer, wordier = forecast.prompt / forecast.seen_prompt, forecast.answer / forecast.seen_answer
    begin_s = requests[0].arrival_s
    return [
        trace_request(
            seen,
            number=number,
            arrival_s=(seen.arrival_s - begin_s) * forecast.pace,
            num_tokens=max(1, round(seen.num_tokens * longer)),
            num_output=max(1, round(answer * wordier)),
        )
        for number, (seen, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def trace_request(
    seen: SeenRequest, *, number: int, arrival_s: float, num_tokens: int, num_output: int
) -> TraceRequest:
    """One that was seen, for the simulator."""
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
    """The forecast, as far as it is further from what was seen than chance takes it, and not too far."""
    forecast, error = holt(series, steps=steps)
    change = forecast - seen
    forecast = seen + math.copysign(max(0.0, abs(change) - _CHANCE * error), change)
    return min(max(forecast, seen / _MOST_RATIO), seen * _MOST_RATIO)
