"""Text that Prometheus scrapes from a router."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.telemetry.metrics import Metrics, TokenHistogram


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_request_is_counted() -> None:
    metrics = Metrics()
    metrics.requests.labels("completed").inc()
    metrics.time_to_first_token.observe(0.2)
    found = scrape(metrics)
    assert found["xpyd_requests_total", frozenset({("outcome", "completed")})] == 1
    assert found["xpyd_time_to_first_token_seconds_sum", frozenset()] == 0.2


def test_per_token_histograms_render_like_any_other() -> None:
    bounds, gaps = (0.25, 0.5, 2.5), [0.0, 0.25, 0.375, 0.5, 3.0, 3.0, 3.0]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = TokenHistogram("gap_seconds", "A gap.", buckets=bounds, registry=ours)
    plain = Histogram("gap_seconds", "A gap.", buckets=bounds, registry=theirs)
    for gap in gaps:
        plain.observe(gap)
    for gap in gaps[:-3]:
        mine.observe(gap)
    mine.observe(3.0, 3)
    lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == lines


def test_registries_are_apart() -> None:
    one, other = Metrics(), Metrics()
    one.generated_tokens.inc(5)
    assert scrape(other)["xpyd_generated_tokens_total", frozenset()] == 0
