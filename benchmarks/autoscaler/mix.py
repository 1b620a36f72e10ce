"""Traffic whose shape turns: requests of real traces, prompt-heavy and answer-heavy ones, more of these now and more of
those then.

Every request is one of a trace's, with its own lengths, and comes in the order that it has there; what is made up is
when it comes, and after which of the other kind.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from core.trace.trace import TraceRequest
from core.types.errors import SpecError

PROMPT_HEAVY = 20.0  # tokens of the prompt for each of the answer, and more
ANSWER_HEAVY = 2.0  # and fewer

_OTHERS = 1 << 40  # ids from here on are of a later time

Wave = Callable[[float], float]  # seconds -> the answer-heavy share, 0 to 1


@dataclass(frozen=True, kw_only=True)
class MixRates:
    """Requests a second while all are of one kind."""

    prompt_heavy: float
    answer_heavy: float


def mix(
    traces: Sequence[Sequence[TraceRequest]], *, rates: MixRates, wave: Wave, swell: Wave, duration_s: float, seed: int
) -> list[TraceRequest]:
    """Of both kinds, by turns from each trace that has such requests, over and over where there are too few; they
    arrive as a Poisson process of `rates` times wave(t) or its complement, times swell(t).

    Raises SpecError where no trace has requests of a kind, or their blocks differ.
    """
    if len({request.tokens_per_id for trace in traces for request in trace}) > 1:
        raise SpecError("the traces differ in the tokens of a block, which one trace cannot")
    prompts = _by_turns(traces, lambda r: r.num_tokens >= PROMPT_HEAVY * r.num_output, "prompt-heavy")
    answers = _by_turns(traces, lambda r: r.num_tokens <= ANSWER_HEAVY * r.num_output, "answer-heavy")
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
        raise SpecError("nothing arrives: longer, or at higher rates")
    begin_s = found[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - begin_s) for request in found]


def turning(period_s: float, *, steep: float = 4.0) -> Wave:
    """From prompt-heavy to answer-heavy and back in each period: a sine, cut off so that either end lasts a while."""
    return lambda t: min(1.0, max(0.0, 0.5 - 0.5 * steep * math.cos(2 * math.pi * t / period_s)))


def slow_sine(period_s: float) -> Wave:
    return lambda t: 0.5 - 0.5 * math.cos(2 * math.pi * t / period_s)


def constant(share: float) -> Wave:
    return lambda t: share


def steps(levels: Sequence[float], *, each_s: float) -> Wave:
    """One level after the other, over and over."""
    return lambda t: levels[int(t / each_s) % len(levels)]


def spike(base: float, peak: float, *, begin_s: float, end_s: float) -> Wave:
    return lambda t: peak if begin_s <= t < end_s else base


def _by_turns(
    traces: Sequence[Sequence[TraceRequest]], belongs: Callable[[TraceRequest], bool], what: str
) -> Iterator[TraceRequest]:
    chosen = [some for trace in traces if (some := [request for request in trace if belongs(request)])]
    if not chosen:
        raise SpecError(f"no trace has {what} requests")

    def forever() -> Iterator[TraceRequest]:
        place = 0
        while True:
            for some in chosen:
                again, index = divmod(place, len(some))
                yield _afresh(some[index], again)
            place += 1

    return forever()


def _afresh(request: TraceRequest, again: int) -> TraceRequest:
    """For the second time and later ones: nothing of it is cached from before."""
    if not again or request.ids is None:
        return request
    return replace(request, ids=tuple(id + again * _OTHERS for id in request.ids))


def _arrivals(draw: random.Random, rate: float, share: Wave, duration_s: float) -> Iterator[float]:
    """A Poisson process of rate · share(t), by thinning one that is as fast as the fastest moment."""
    moments = [share(duration_s * i / 1000) for i in range(1001)]
    most = rate * max(moments)
    found, t = [], 0.0
    while most > 0 and (t := t + draw.expovariate(most)) < duration_s:
        if draw.random() * most < rate * share(t):
            found.append(t)
    return iter(found)
