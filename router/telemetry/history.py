"""History of a router over the last minutes, one point per second: token and request rates, and latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

from prometheus_client.core import Metric

from router.telemetry.metrics import Metrics

_POINTS = 300


@dataclass(frozen=True, slots=True)
class Point:
    """Rates and latencies of one second. Quantiles are None if nothing arrived in it."""

    at: float  # time.monotonic
    tokens_per_s: float
    requests_per_s: float
    ttft_s: tuple[float, float] | None  # P50, P99
    itl_s: tuple[float, float] | None
    waiting: int


class History:
    """History of one router. Lives on the event loop; `take` is called about once per second."""

    def __init__(self, metrics: Metrics) -> None:
        self.points: deque[Point] = deque(maxlen=_POINTS)
        self._metrics = metrics
        self._last = self._counted()

    def take(self) -> None:
        last, now = self._last, self._counted()
        self._last = now
        seconds = max(now.at - last.at, 1e-3)
        self.points.append(
            Point(
                at=now.at,
                tokens_per_s=(now.tokens - last.tokens) / seconds,
                requests_per_s=(now.requests - last.requests) / seconds,
                ttft_s=_quantiles(last.ttft, now.ttft),
                itl_s=_quantiles(last.itl, now.itl),
                waiting=now.waiting,
            )
        )

    def _counted(self) -> _Counted:
        metrics = self._metrics
        return _Counted(
            at=monotonic(),
            tokens=_sum(metrics.generated_tokens.collect(), "_total"),
            requests=_sum(metrics.requests.collect(), "_total"),
            waiting=int(_sum(metrics.requests_waiting.collect(), "")),
            ttft=_buckets(metrics.time_to_first_token.collect()),
            itl=_buckets(metrics.inter_token_latency.collect()),
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    at: float
    tokens: float
    requests: float
    waiting: int
    ttft: Sequence[tuple[float, float]]  # (upper bound, cumulative count)
    itl: Sequence[tuple[float, float]]


def quantile(q: float, counts: Sequence[tuple[float, float]]) -> float | None:
    """Return the q-quantile of a histogram, interpolated as in Prometheus; None if it is empty.

    counts: (upper bound, cumulative count) in ascending order.
    """
    total = counts[-1][1] if counts else 0.0
    if not total:
        return None
    rank, (bound, count) = q * total, counts[0]
    if rank <= count:
        return bound * rank / count
    for (low, below), (high, count) in pairwise(counts):
        if rank <= count:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (count - below)
    return counts[-1][0]


def _quantiles(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    counts = [(bound, now - then) for (bound, now), (_, then) in zip(after, before, strict=True)]
    middle, high = quantile(0.5, counts), quantile(0.99, counts)
    return None if middle is None or high is None else (middle, high)


def _buckets(families: Iterable[Metric]) -> list[tuple[float, float]]:
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_bucket")]
    return [(float(sample.labels["le"]), sample.value) for sample in samples]


def _sum(families: Iterable[Metric], ending: str) -> float:
    return sum(s.value for family in families for s in family.samples if s.name == family.name + ending)
