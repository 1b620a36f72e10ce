"""Timeline of one request: the phases it passed through on the router and on its replicas.

A router keeps the timelines of its last requests, traced or not. `cluster trace` and the status page draw them, and
traced requests export them as spans. Replicas report durations, which the router places before the moment at which it
received them: no clock of another host is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from time import monotonic
from typing import Any

_MAX_SPANS = 256  # of one request: bounds 128 choices that are retried one by one


class RequestPhase(StrEnum):
    """Phase of a request. Where several overlap, the others wait for the one listed first."""

    PREPARE = "prepare"  # router: validation, chat template, tokenizer
    QUEUE = "queue"  # router: waiting for replicas with room
    COMPUTE = "compute"  # prefill of the prompt
    FETCH = "pull"  # prefix from a peer or a lower tier
    WIRE = "wire"  # KV transfer to the decode replica
    ROUTE = "route"  # calls to the replicas
    WAIT = "wait"  # replica: waiting for its turn, for blocks or for KV in flight
    DECODE = "decode"
    MOVE = "move"  # migration to another decode replica while decoding continues


_ORDER = {state: number for number, state in enumerate(RequestPhase)}


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one phase, in seconds since the request's arrival."""

    state: RequestPhase
    replica: str  # empty: the router
    start_s: float
    end_s: float


@dataclass(slots=True, eq=False)
class Timeline:
    """Timeline of one request. Written on the router's event loop; times are of `time.monotonic`."""

    began: float = field(default_factory=monotonic)  # arrival
    spans: list[tuple[RequestPhase, str, float, float]] = field(default_factory=list)  # fields of Span, absolute times
    first_s: float = 0.0  # time to first token, set at the end; 0: running, or no token
    ended: float = 0.0  # 0: running
    outcome: str = ""
    trace_id: str = ""  # W3C; empty: not traced
    troubles: list[str] = field(default_factory=list)  # reasons for its retries

    def add(self, state: RequestPhase, replica: str, start: float, end: float | None = None) -> None:
        """Add a span that ends at `end` (None: now). Empty spans are dropped."""
        end = monotonic() if end is None else end
        if start < end and len(self.spans) < _MAX_SPANS:
            self.spans.append((state, replica, start, end))

    def add_before(self, end: float, replica: str, parts: list[tuple[RequestPhase, float]], *, since: float) -> float:
        """Add consecutive spans of these durations. The last one ends at `end`; none begins before `since`.

        Returns the start of the first one.
        """
        at = end
        for state, seconds in reversed(parts):
            start = max(since, at - max(0.0, seconds))
            self.add(state, replica, start, at)
            at = start
        return at

    def told(self) -> list[Span]:
        """Return the spans ordered by their start."""
        spans = [Span(state, place, start - self.began, end - self.began) for state, place, start, end in self.spans]
        return sorted(spans, key=lambda span: (span.start_s, _ORDER[span.state]))

    def as_dict(self) -> dict[str, Any]:
        """Return the timeline as plain values."""
        return {
            "outcome": self.outcome or "running",
            "seconds": (self.ended or monotonic()) - self.began,
            "first_token_s": self.first_s,
            "trace_id": self.trace_id,
            "troubles": list(self.troubles),
            "spans": [[span.state.value, span.replica, span.start_s, span.end_s] for span in self.told()],
        }


def spans_of(told: dict[str, Any]) -> list[Span]:
    """Parse the spans of an `as_dict` result."""
    return [
        Span(RequestPhase(state), str(place), float(start), float(end)) for state, place, start, end in told["spans"]
    ]


def critical_path(spans: list[Span]) -> list[Span]:
    """Return what the request waited for at each moment, from its first to its last.

    Of overlapping phases, the one that comes first in RequestPhase counts; of two equal ones the one that started last.
    Adjacent spans of one phase on one replica are merged.
    """
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
