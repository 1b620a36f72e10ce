"""What a router shows: its replicas as they join and leave, its metrics, and the last minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.rpc.worker_pb2 import Status, Totals
from core.types.request import Role
from router.routing.decisions import Decisions
from router.telemetry.metrics import Metrics, TokenHistogram
from router.telemetry.traffic import Flows
from router.telemetry.view import History, RouterView, quantile
from tests.support.members import make_member


@dataclass
class FakeSeenReplica:
    """Stand-in for the part of router.serving.replicas.Replica that the view reads."""

    id: str
    role: Role
    is_alive: bool = True
    status: Status = field(default_factory=Status)

    @property
    def member(self) -> Any:
        return make_member(self.id)


def _view(replicas: list[FakeSeenReplica], flows: Flows | None = None) -> RouterView:
    seen: Any = replicas
    return RouterView(
        deployment="d",
        router="router-0",
        replicas=seen,
        metrics=Metrics(),
        decisions=Decisions(),
        flows=flows or Flows(),
    )


def shown_replicas(statuses: Mapping[str, Status]) -> list[dict[str, Any]]:
    """Return the replicas as a router shows them. statuses: by the name of the replica."""
    seen = [FakeSeenReplica(id, Role(id.partition("-")[0]), status=status) for id, status in statuses.items()]
    shown: list[dict[str, Any]] = _view(seen).now()["replicas"]
    return shown


def test_replicas_that_come_and_go_are_told_once() -> None:
    old, new = FakeSeenReplica("decode-2", Role.DECODE), FakeSeenReplica("decode-10", Role.DECODE, is_alive=False)
    replicas = [old]
    view = _view(replicas)
    view.take()
    assert not view.now()["events"], "replicas present at the start give no event"
    replicas.append(new)
    view.take()
    assert [one["state"] for one in view.now()["replicas"]] == ["joining", "ready"], "those of interest come first"
    new.is_alive = True
    view.take()
    old.is_alive = False
    assert [(one["id"], one["state"]) for one in view.now()["replicas"]] == [
        ("decode-2", "lost"),
        ("decode-10", "ready"),
    ]
    view.take()
    new.status.draining = True
    view.take()
    replicas.clear()
    view.take()
    view.take()
    shown = [(one["replica"], one["text"]) for one in reversed(view.now()["events"])]
    assert shown == [
        ("decode-10", "is joining"),
        ("decode-10", "is ready"),
        ("decode-2", "is lost"),
        ("decode-10", "is draining"),
        ("decode-2", "is gone"),
        ("decode-10", "is gone"),
    ]


def test_reuse_is_shown_if_known() -> None:
    totals = Totals(prompt_tokens=100, prefix_hit_tokens=25)
    prefill = FakeSeenReplica("prefill-0", Role.PREFILL, status=Status(totals=totals))
    decode = FakeSeenReplica("decode-1", Role.DECODE, status=Status(totals=totals))
    shown = {one["id"]: one["reused"] for one in _view([prefill, decode]).now()["replicas"]}
    assert shown == {"prefill-0": 0.25, "decode-1": None}, "a decode replica receives prompts as well"


def test_flows_between_two_replicas_are_summed() -> None:
    flows = Flows()
    for num_bytes in (1000, 4000):
        flows.add("handoff", "prefill-0", "decode-1", num_bytes)
    flows.add("pull", "decode-1", "prefill-0", 10_000)
    fetch, handoff = _view([], flows).now()["flows"]
    assert (fetch["kind"], fetch["source"], handoff["bytes_per_s"]) == ("pull", "decode-1", 1000.0)


def test_the_number_of_listed_replicas_is_bounded() -> None:
    replicas = [FakeSeenReplica(f"decode-{number}", Role.DECODE) for number in range(300)]
    replicas[299].is_alive = False
    shown = _view(replicas).now()
    assert shown["num_replicas"] == 300 and len(shown["replicas"]) == 256 and shown["replicas"][0]["id"] == "decode-299"


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
