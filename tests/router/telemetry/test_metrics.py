"""Text that Prometheus scrapes from a router, and the history of the last minutes."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.telemetry.history import History, quantile
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


@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, [], None),
        (0.5, [(1.0, 0.0), (float("inf"), 0.0)], None),
        (0.5, [(1.0, 10.0), (2.0, 10.0)], 0.5),
        (0.5, [(1.0, 0.0), (2.0, 10.0), (float("inf"), 10.0)], 1.5),
        (0.99, [(1.0, 5.0), (2.0, 10.0), (float("inf"), 10.0)], pytest.approx(1.98)),
        (0.99, [(1.0, 5.0), (float("inf"), 10.0)], 1.0),  # above the last finite bound
    ],
)
def test_quantiles_are_those_of_prometheus(q: float, counts: list[tuple[float, float]], expected: object) -> None:
    assert quantile(q, counts) == expected


def test_a_point_holds_the_rates_of_its_second() -> None:
    metrics = Metrics()
    metrics.requests_waiting.set_function(lambda: 3)
    metrics.time_to_first_token.observe(50.0)  # before the point's second
    history = History(metrics)
    metrics.time_to_first_token.observe(0.2)
    metrics.inter_token_latency.observe(0.02, 7)
    metrics.generated_tokens.inc(8)
    metrics.requests.labels("completed").inc()
    history.take()
    history.take()
    busy, quiet = history.points
    assert busy.ttft_s and 0.1 < busy.ttft_s[0] <= busy.ttft_s[1] <= 0.25
    assert busy.itl_s and busy.itl_s[1] <= 0.02 and busy.waiting == 3
    assert busy.tokens_per_s / busy.requests_per_s == pytest.approx(8)
    assert (quiet.ttft_s, quiet.itl_s, quiet.tokens_per_s) == (None, None, 0.0)


def test_history_is_bounded() -> None:
    history = History(Metrics())
    for _ in range(400):
        history.take()
    assert len(history.points) == 300
