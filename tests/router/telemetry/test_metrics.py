"""Text scraped by Prometheus: names, units, labels, and replicas that join and leave."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.rpc.worker_pb2 import Drafted, Status, StepTiming, Totals
from core.types.request import Role
from router.telemetry.metrics import Metrics, TokenHistogram


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_a_request_is_counted() -> None:
    metrics = Metrics()
    metrics.requests.labels("completed").inc()
    metrics.time_to_first_token.observe(0.2)
    found = scrape(metrics)
    assert found["requests_total", frozenset({("outcome", "completed")})] == 1
    assert found["time_to_first_token_seconds_sum", frozenset()] == 0.2


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


def test_replicas_are_exported_from_their_last_report() -> None:
    statuses = [
        (Role.PREFILL, Status(replica="prefill-0", waiting=3, totals=Totals(transfer_bytes=1 << 40))),
        (
            Role.DECODE,
            Status(
                replica="decode-0",
                timing=StepTiming(base_s=0.5),
                blocks_total=10,
                blocks_free=4,
                blocks_cached=5,
                draining=True,
                totals=Totals(drafted=[Drafted(method="suffix", tokens=[9, 4], accepted=[7, 3])]),
            ),
        ),
    ]
    metrics = Metrics()
    metrics.watch(lambda: statuses)
    prefill = frozenset({("replica", "prefill-0"), ("role", "prefill")})
    decode = frozenset({("replica", "decode-0"), ("role", "decode")})
    found = scrape(metrics)
    assert found["sequences_waiting", prefill] == 3
    assert found["kv_transfer_bytes_total", prefill] == 1 << 40
    assert [found[f"kv_blocks{kind}", decode] for kind in ("", "_free", "_cached")] == [10, 4, 5]
    assert found["replica_draining", decode] == 1
    drafts = [
        found[f"speculation_{kind}_tokens_total", decode | {("method", "suffix"), ("place", place)}]
        for kind in ("drafted", "accepted")
        for place in "01"
    ]
    assert drafts == [9, 4, 7, 3]
    assert found["step_base_seconds", decode] == 0.5 and ("step_base_seconds", prefill) not in found

    statuses.pop(0)
    assert ("sequences_waiting", prefill) not in scrape(metrics)


def test_registries_are_independent() -> None:
    one, other = Metrics(), Metrics()
    one.generated_tokens.inc(5)
    assert scrape(other)["generated_tokens_total", frozenset()] == 0


def test_every_name_carries_its_unit() -> None:
    metrics = Metrics()
    metrics.watch(list)  # no replica
    for family in metrics.registry.collect():
        assert family.documentation.endswith("."), family.name
        assert "time" not in family.name or family.name.endswith("_seconds"), family.name
        assert family.type != "counter" or all(s.name.endswith(("_total", "_created")) for s in family.samples)
