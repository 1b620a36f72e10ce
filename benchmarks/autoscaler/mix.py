"""Traffic mix that changes over time: prompt-heavy and answer-heavy requests of real traces, in varying proportion.

Requests keep their lengths and their order within a trace; only arrival times and the interleaving are synthetic.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.trace.trace import TraceRequest
from core.types.errors import SpecError

# Minimum ratio of prompt tokens to answer tokens.
PROMPT_HEAVY = 20.0
# Maximum ratio of prompt tokens to answer tokens.
ANSWER_HEAVY = 2.0

# Offset of hash ids when a trace is repeated.
_OTHERS = 1 << 40

# Maps seconds to the answer-heavy share, 0 to 1.
Wave = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class MixRates:
    """Request rates per second if all requests are of one kind."""

    prompt_heavy: float
    answer_heavy: float


def mix(
    traces: Sequence[Sequence[TraceRequest]], *, rates: MixRates, wave: Wave, swell: Wave, duration_s: float, seed: int
) -> list[TraceRequest]:
    """Mix requests of both kinds, taken from the traces in turn and repeated as needed.

    Each kind arrives as a Poisson process with its rate in `rates`, times wave(t) or its complement, times swell(t).
    Raises SpecError if no trace has requests of a kind, or if block sizes differ.
    """
    if len({request.tokens_per_id for trace in traces for request in trace}) > 1:
        raise SpecError("the traces have different block sizes")
    prompts = _round_robin(traces, lambda r: r.num_tokens >= PROMPT_HEAVY * r.num_output, "prompt-heavy")
    answers = _round_robin(traces, lambda r: r.num_tokens <= ANSWER_HEAVY * r.num_output, "answer-heavy")
    draw = random.Random(seed)
    comes = heapq.merge(
        (
            (when, prompts)
            for when in _arrivals(draw, rates.prompt_heavy, lambda t: (1 - wave(t)) * swell(t), duration_s)
        ),
        ((when, answers) for when in _arrivals(draw, rates.answer_heavy, lambda t: wave(t) * swell(t), duration_s)),
        key=lambda one: one[0],
    )
    found = [replace(next(kind), number=number, arrival_s=when) for number, (when, kind) in enumerate(comes)]
    if not found:
        raise SpecError("no request arrives; increase the duration or the rates")
    begin_s = found[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - begin_s) for request in found]


def turning(period_s: float, *, steep: float = 4.0) -> Wave:
    """Alternate between prompt-heavy and answer-heavy: a sine, clipped so that both extremes last a while."""
    return lambda t: min(1.0, max(0.0, 0.5 - 0.5 * steep * math.cos(2 * math.pi * t / period_s)))


def slow_sine(period_s: float) -> Wave:
    return lambda t: 0.5 - 0.5 * math.cos(2 * math.pi * t / period_s)


def constant(share: float) -> Wave:
    return lambda t: share


def steps(levels: Sequence[float], *, each_s: float) -> Wave:
    """Repeat the levels, `each_s` seconds per level."""
    return lambda t: levels[int(t / each_s) % len(levels)]


def spike(base: float, peak: float, *, begin_s: float, end_s: float) -> Wave:
    return lambda t: peak if begin_s <= t < end_s else base


def _round_robin(
    traces: Sequence[Sequence[TraceRequest]], belongs: Callable[[TraceRequest], bool], kind: str
) -> Iterator[TraceRequest]:
    chosen = [some for trace in traces if (some := [request for request in trace if belongs(request)])]
    if not chosen:
        raise SpecError(f"no trace has {kind} requests")

    def forever() -> Iterator[TraceRequest]:
        place = 0
        while True:
            for some in chosen:
                again, index = divmod(place, len(some))
                yield _with_new_ids(some[index], again)
            place += 1

    return forever()


def _with_new_ids(request: TraceRequest, again: int) -> TraceRequest:
    """Give a repeated request new hash ids, so that no prefix is cached."""
    if not again or request.ids is None:
        return request
    return replace(request, ids=tuple(id + again * _OTHERS for id in request.ids))


def _arrivals(draw: random.Random, rate: float, share: Wave, duration_s: float) -> Iterator[float]:
    """Yield arrivals of a Poisson process with rate · share(t), by thinning a process at the maximum rate."""
    moments = [share(duration_s * i / 1000) for i in range(1001)]
    most = rate * max(moments)
    found, t = [], 0.0
    while most > 0 and (t := t + draw.expovariate(most)) < duration_s:
        if draw.random() * most < rate * share(t):
            found.append(t)
    return iter(found)
