"""Where one request's time went: the states that it passed, on the router and on the replicas that served it.

A router keeps this of its last requests, whether or not anybody traces them; `cluster trace` draws it, the page shows
it, and what is traced becomes spans of it. What passes on a replica comes as durations, which the router lays down
before the moment at which it heard of their end: no clock of another host is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from time import monotonic
from typing import Any

_MAX_SPANS = 256  # of one request: 128 choices that go on elsewhere one by one would have no end of them


class RequestPhase(StrEnum):
    """Where several overlap, the one that stands here first is what the others wait for."""

    PREPARE = "prepare"  # the router checks, renders and tokenises
    QUEUE = "queue"  # in the router, until replicas have room
    COMPUTE = "compute"  # the prompt, where it is computed
    FETCH = "pull"  # its prefix, from a peer or a lower tier
    WIRE = "wire"  # its KV, to the decode replica
    ROUTE = "route"  # the calls to the replicas
    WAIT = "wait"  # on a replica: for its turn there, for blocks, for KV that comes
    DECODE = "decode"
    MOVE = "move"  # to another decode replica, while it goes on


_ORDER = {state: number for number, state in enumerate(RequestPhase)}


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since the request's arrival."""

    state: RequestPhase
    replica: str  # "": the router
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class Timeline:
    """Of one request. Written on the event loop of its router, by the clock `time.monotonic`."""

    began: float = field(default_factory=monotonic)  # its arrival
    spans: list[tuple[RequestPhase, str, float, float]] = field(default_factory=list)  # as Span has them, by that clock
    first_s: float = 0.0  # until its first token, told when it is over; 0: it is not, or none came
    ended: float = 0.0  # 0: it is under way
    outcome: str = ""
    trace_id: str = ""  # of W3C, where it is traced
    troubles: list[str] = field(default_factory=list)  # why it went on elsewhere

    def add(self, state: RequestPhase, replica: str, start: float, end: float | None = None) -> None:
        """end: None: now. What took no time is no state that it was in."""
        end = monotonic() if end is None else end
        if start < end and len(self.spans) < _MAX_SPANS:
            self.spans.append((state, replica, start, end))

    def add_before(self, end: float, replica: str, parts: list[tuple[RequestPhase, float]], *, since: float) -> float:
        """Durations one after the other, the last of which ended at `end`, none before `since`; the moment at which the
        first of them began."""
        at = end
        for state, seconds in reversed(parts):
            start = max(since, at - max(0.0, seconds))
            self.add(state, replica, start, at)
            at = start
        return at

    def told(self) -> list[Span]:
        """In the order of their beginnings."""
        spans = [Span(state, who, start - self.began, end - self.began) for state, who, start, end in self.spans]
        return sorted(spans, key=lambda span: (span.start_s, _ORDER[span.state]))

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "outcome": self.outcome or "running",
            "seconds": (self.ended or monotonic()) - self.began,
            "first_token_s": self.first_s,
            "trace_id": self.trace_id,
            "troubles": list(self.troubles),
            "spans": [[span.state.value, span.replica, span.start_s, span.end_s] for span in self.told()],
        }


def spans_of(told: dict[str, Any]) -> list[Span]:
    """Of what as_dict has told."""
    return [Span(RequestPhase(state), str(who), float(start), float(end)) for state, who, start, end in told["spans"]]


def critical_path(spans: list[Span]) -> list[Span]:
    """What the request was waiting for at each moment, from its first to its last: of those states that overlap, the
    one that the others wait for, and of two alike the one that began last. Neighbours of one state on one replica are
    one."""
    moments = sorted({moment for span in spans for moment in (span.start_s, span.end_s)})
    path: list[Span] = []
    for start, end in pairwise(moments):
        under_way = [span for span in spans if span.start_s <= start and span.end_s >= end]
        if not under_way:
            continue
        first = min(under_way, key=lambda span: (_ORDER[span.state], -span.start_s))
        last = path[-1] if path else None
        if last and (last.state, last.replica, last.end_s) == (first.state, first.replica, start):
            path[-1] = Span(last.state, last.replica, last.start_s, end)
        else:
            path.append(Span(first.state, first.replica, start, end))
    return path
