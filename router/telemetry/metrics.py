"""Prometheus metrics of one router. Names carry base units; counters end in `_total`.

Replicas export their own: worker/metrics.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from core.types.errors import outcome_codes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of the histogram buckets, in seconds.
_WAIT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class Metrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "xpyd_requests_total",
            "Requests finished, by outcome: completed, cancelled, or the code of the error.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("completed", "cancelled", *outcome_codes()):  # rate() needs the 0 before the first increment
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("xpyd_prompt_tokens_total", "Prompt tokens of requests.", registry=registry)
        self.cached_tokens = Counter(
            "xpyd_cached_prompt_tokens_total", "Prompt tokens of requests that came from a cache.", registry=registry
        )
        self.generated_tokens = TokenCounter(
            "xpyd_generated_tokens_total", "Tokens sent to clients, counted as they are sent.", registry=registry
        )
        self.task_deaths = Counter(
            "xpyd_background_task_restarts_total",
            "Background tasks of the router that crashed or ended and were restarted.",
            ["task"],
            registry=registry,
        )
        self.members_rejected = Counter(
            "xpyd_member_records_rejected_total",
            "Member records that the router rejected: unsigned, malformed, or of another wire version. The log of the "
            "router names them.",
            ["reason"],
            registry=registry,
        )
        self.requests_waiting = Gauge(
            "xpyd_requests_waiting", "Requests queued until a replica has room.", registry=registry
        )
        self.usable_replicas = Gauge(
            "xpyd_usable_replicas", "Replicas that the router can send requests to.", ["role"], registry=registry
        )
        self.local_decodes = Counter(
            "xpyd_local_decodes_total",
            "Requests that a prefill replica decoded itself, because the decode replicas were full or gone.",
            registry=registry,
        )
        self.tenants_at_share = Gauge(
            "xpyd_tenants_at_share",
            "Tenants whose requests wait because the tenant has reached its share: see `router.tenant_share`.",
            registry=registry,
        )
        self.queue_time = Histogram(
            "xpyd_queue_time_seconds",
            "Time from the arrival of a request until a replica admits it.",
            buckets=_WAIT,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "xpyd_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            buckets=_WAIT,
            registry=registry,
        )
        self.inter_token_latency = TokenHistogram(
            "xpyd_inter_token_latency_seconds",
            "Time between two tokens of one choice.",
            buckets=_STEP,
            registry=registry,
        )
        self.request_time = Histogram(
            "xpyd_request_duration_seconds",
            "Time from the arrival of a request to its last token.",
            buckets=_WHOLE,
            registry=registry,
        )

    def render(self) -> bytes:
        """Prometheus's text format, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


class TokenCounter(Collector):
    """Counter like prometheus_client's, but for one thread and without locks, because each token updates it."""

    def __init__(self, name: str, meaning: str, *, registry: CollectorRegistry) -> None:
        self._name, self._meaning = name, meaning
        self._count = 0
        registry.register(self)

    def inc(self, count: int) -> None:
        self._count += count

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._meaning, value=self._count)


class TokenHistogram(Collector):
    """Histogram like prometheus_client's, but for one thread and without locks, because each token updates it."""

    def __init__(self, name: str, meaning: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._meaning = name, meaning
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum_s)
