"""Admin endpoints and metrics of a whole deployment: requests, replicas and routers."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from cluster.cli.top import plain
from cluster.cli.trace import picture
from core.index import router_addresses
from core.trace.traffic import ShownDecision, TrafficAnswer, TrafficReport
from core.types.request import Role, Sampling
from core.types.timeline import RequestPhase, critical_path, spans_of
from frontend.service import RouterService
from router.telemetry import traffic
from tests.e2e.conftest import Lab, exact_tree
from tests.support.plain_http import http_client
from tests.support.router_service import admin_url, http_url, router_service
from tests.support.scraping import scrape, targets_of
from tests.support.waiting import told


async def test_operators_see_requests_replicas_and_routers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "_REPORT_S", 0.05)
    monkeypatch.setattr(router_addresses, "_RENEW_S", 0.05)
    model = {"served_name": "tiny"}
    async with (
        lab.shared(lab.checkpoint("llama", max_position_embeddings=256), **exact_tree(1, 1)) as cluster,
        router_service(cluster, "router-1", model=model) as first,
        router_service(cluster, "router-2", model=model) as second,
    ):
        await _look([first, second])


async def _look(services: list[RouterService]) -> None:
    endpoints = [http_client(base_url=http_url(service)) for service in services]
    admins = [http_client(base_url=admin_url(service)) for service in services]
    body = {"prompt": [5 + i % 20 for i in range(70)], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = await endpoints[0].post("/v1/completions", json=body, headers={"x-request-id": "r-1"}, timeout=60)
    assert answer.status_code == 200 and "traceparent" not in answer.headers

    # A request's life, by its id or its answer's; of the router that served it.
    (life,) = (await admins[0].get("/debug/lives/cmpl-r-1")).json().values()
    spans = spans_of(life)
    assert {(span.state, span.replica) for span in spans} >= {
        (RequestPhase.PREPARE, ""),
        (RequestPhase.QUEUE, ""),
        (RequestPhase.ROUTE, "decode-1"),
        (RequestPhase.ROUTE, "prefill-0"),
        (RequestPhase.COMPUTE, "prefill-0"),
        (RequestPhase.WIRE, "prefill-0"),
        (RequestPhase.WAIT, "decode-1"),
        (RequestPhase.DECODE, "decode-1"),
    }
    assert life["outcome"] == "completed" and 0 < life["first_token_s"] < life["seconds"]
    assert all(0 <= span.start_s < span.end_s <= life["seconds"] for span in spans)
    path = critical_path(spans)
    assert path[0].state is RequestPhase.PREPARE and path[-1].state is RequestPhase.DECODE
    assert any("compute" in line and "#" in line for line in picture("r-1", life))
    assert (await admins[1].get("/debug/lives/r-1")).status_code == 404

    # Any router lists all routers for Prometheus.
    addresses = {"{}:{}".format(*service.admin_address) for service in services}

    async def all_targets() -> bool:
        groups = (await admins[0].get("/targets")).json()
        return {
            target for group in groups if group["labels"]["role"] == "router" for target in group["targets"]
        } == addresses

    await told(all_targets)

    # The view of the cluster.
    view = (await admins[0].get("/debug/view")).json()
    assert {one["id"]: one["state"] for one in view["replicas"]} == {"prefill-0": "ready", "decode-1": "ready"}
    (flow,) = view["flows"]
    assert (flow["kind"], flow["source"], flow["target"]) == ("handoff", "prefill-0", "decode-1")
    assert flow["bytes_per_s"] > 0
    (decision,) = view["decisions"]
    assert decision["request"].startswith("r-1-") and decision["outcome"] == "completed"
    assert decision["options"][0]["prefill"] == "prefill-0" and decision["options"][0]["cost_s"] > 0
    assert sorted(view["routers"].values()) == sorted(addresses)

    # The controller's decisions, which the router receives in reply to its traffic report.
    decision_shown = ShownDecision(at=0.0, text="2P1D", reason="first tokens come late")

    async def answer(news: TrafficReport) -> TrafficAnswer:
        return TrafficAnswer(life="a", scaling=(decision_shown,))

    async def is_shown() -> bool:
        return bool((await admins[0].get("/debug/view")).json()["autoscaler"])

    services[0].own.report_traffic(answer)
    await told(is_shown)
    view = (await admins[0].get("/debug/view")).json()
    lines = plain([view, (await admins[1].get("/debug/view")).json()]).splitlines()
    assert view["autoscaler"][0]["text"] == "2P1D" and any("first tokens come late" in line for line in lines)
    assert "2 routers, 1P1D" in lines[0] and any(line.startswith("decode-1") for line in lines)

    # The HTML page, which rejects other Host names (DNS rebinding).
    page = await admins[0].get("/ui")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    for path_ in ("/ui", "/ui/events", "/debug/view"):
        assert (await admins[0].get(path_, headers={"host": "evil.example:9100"})).status_code == 421
    async with admins[0].stream("GET", "/ui/events", headers={"host": "localhost:1"}) as events:
        names = [line async for line in _first(events, 2)]
    assert names == ["event: all", "event: now"]
    for client in (*endpoints, *admins):
        await client.aclose()


async def _first(events: httpx.Response, number: int) -> Any:
    async for line in events.aiter_lines():
        if line.startswith("event: "):
            yield line
            number -= 1
            if not number:
                return


async def test_workers_are_scraped_until_they_die(lab: Lab) -> None:
    """A router lists all routers and workers for Prometheus, and each exports itself alone."""
    tree = exact_tree(1, 1)
    tree["model"] |= {"served_name": "tiny"}
    async with (
        lab.own(lab.checkpoint("llama"), processes=True, **tree) as cluster,
        router_service(cluster) as service,
    ):
        admin = "{}:{}".format(*service.admin_address)

        async def listed() -> dict[str, str]:
            targets = await asyncio.to_thread(targets_of, admin)
            assert all(one.labels["deployment"] == "cluster" and one.labels["model"] == "tiny" for one in targets)
            return {one.labels.get("replica", one.labels["role"]): one.address for one in targets}

        async def all_are_listed() -> bool:
            return (await listed()).keys() == {"router", "prefill-0", "decode-1"}

        await told(all_are_listed)
        addresses = await listed()
        assert addresses["router"] == admin
        await cluster.generate(range(5, 60), Sampling(max_tokens=4, temperature=0.0))
        await cluster.idle()

        samples = await asyncio.to_thread(lambda: list(scrape(addresses["decode-1"])))
        labels = {"deployment": "cluster", "model": "tiny", "replica": "decode-1", "role": "decode"}
        assert all(sample.labels.items() >= labels.items() for sample in samples)

        async def has_counted() -> bool:
            samples = await asyncio.to_thread(lambda: list(scrape(addresses["prefill-0"])))
            return {sample.name: sample.value for sample in samples}["xpyd_kv_transfer_bytes_total"] > 0

        await told(has_counted)
        samples = await asyncio.to_thread(lambda: list(scrape(admin)))
        assert not [sample for sample in samples if "replica" in sample.labels]

        await asyncio.to_thread(cluster.pools[Role.DECODE][0].send, signal.SIGKILL)

        async def has_left() -> bool:
            return (await listed()).keys() == {"router", "prefill-0"}

        await told(has_left)
