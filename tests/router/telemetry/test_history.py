"""History of the last minutes, derived from the metrics."""

from __future__ import annotations

import pytest

from router.telemetry.history import History, quantile
from router.telemetry.metrics import Metrics


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
