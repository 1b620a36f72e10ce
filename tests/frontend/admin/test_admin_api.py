"""Admin endpoint: operator data on an address separate from the clients'."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, StringConstraints, TypeAdapter

from cluster.launch.router_admin import ask_at, ask_here, seen_by
from core.index.membership import Member
from core.process.ports import free_ports
from core.types.errors import DeployError
from frontend.access.access import Access
from frontend.admin.admin_server import UiPage, create_admin_app, open_admin_listener
from frontend.http.app import create_app
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.members import make_member
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions


def app(
    *,
    deployment: str = "d",
    router: str = "router-1",
    decode: int = 1,
    page: UiPage | None = None,
    routers: Mapping[str, str] | None = None,
    members: Sequence[Member] = (),
) -> Any:
    return create_admin_app(
        deployment=deployment,
        model="m",
        routers=lambda: routers or {},
        members=lambda: members,
        router=router,
        health=lambda: {"prefill": 2, "decode": decode},
        is_ready=lambda: decode > 0,
        metrics=lambda: b"xpyd_requests_total 1\n",
        explain_route=lambda request_id: {request_id: []} if request_id == "r/1" else {},
        page=page,
    )


async def test_reports_what_clients_do_not_see() -> None:
    listener = await open_admin_listener(app(), host="127.0.0.1", ports=[0])
    async with http_client(base_url="http://{}:{}".format(*listener.address)) as http:
        health = (await http.get("/health")).json()
        assert health == {
            "deployment": "d",
            "router": "router-1",
            "replicas": {"prefill": 2, "decode": 1},
            "problem": "",
        }
        metrics = await http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain") and metrics.text == "xpyd_requests_total 1\n"
        assert (await http.get("/debug/routes/r1")).status_code == 404
        for known in ("r%2F1", "chatcmpl-r%2F1", "cmpl-r%2F1"):  # id of the request or of its response
            assert (await http.get(f"/debug/routes/{known}")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 404
    await listener.close(grace_s=5)


class Targets(BaseModel):
    """Group of targets, as Prometheus's HTTP service discovery defines it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    targets: list[Annotated[str, StringConstraints(pattern=r"^[^/ ]+:\d+$")]]
    labels: dict[Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")], str]


async def test_targets_list_routers_and_workers_for_prometheus() -> None:
    members = [make_member("decode-0"), make_member("prefill-1")]
    members[0] = replace(members[0], metrics_address="10.0.0.7:4000")
    known = {"router-1": "127.0.0.1:9100", "router-2": "10.0.0.2:9100"}
    async with serve_http(app(members=members, routers=known)) as address, http_client() as http:
        answer = await http.get("http://{}:{}/targets".format(*address), headers={"host": "prometheus.example"})
    assert answer.headers["content-type"] == "application/json"
    groups = TypeAdapter(list[Targets]).validate_json(answer.content)
    common = {"deployment": "d", "model": "m"}
    assert [(group.targets, group.labels) for group in groups] == [
        (["127.0.0.1:9100", "10.0.0.2:9100"], common | {"role": "router"}),
        (["10.0.0.7:4000"], common | {"role": "decode", "replica": "decode-0"}),
    ], "prefill-1 announces no port"


@pytest.mark.parametrize(
    "path", ["/ui", "/ui/page.js", "/ui/events", "/debug/view", "/debug/routes/r", "/debug/lives/r"]
)
async def test_rebound_host_name_is_rejected(path: str) -> None:
    page = UiPage(lambda has_history: {}, host="127.0.0.1")
    async with serve_http(app(page=page)) as (host, port), http_client() as http:
        for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", f"localhost.evil:{port}", ""):
            answer = await http.get(f"http://{host}:{port}{path}", headers={"host": name})
            assert answer.status_code == 421, name
        scraped = await http.get(f"http://{host}:{port}/metrics", headers={"host": "prometheus.example"})
        assert scraped.status_code == 200, "by whatever name a scraper has for it"
        if path != "/ui/events":
            for name in (f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
                answer = await http.get(f"http://{host}:{port}{path}", headers={"host": name})
                assert answer.status_code in (200, 404)


async def test_routers_of_one_machine_take_ports_in_turn() -> None:
    first = free_ports(2)
    listeners = [await open_admin_listener(app(), host="127.0.0.1", ports=[first, first + 1]) for _ in range(2)]
    assert [listener.address[1] for listener in listeners] == [first, first + 1]
    with pytest.raises(DeployError, match=f"router.admin_port: no port from {first} to {first + 1}"):
        await open_admin_listener(app(), host="127.0.0.1", ports=[first, first + 1])
    for listener in listeners:
        await listener.close(grace_s=5)


async def test_port_taken_by_another_process_is_skipped() -> None:
    async with serve_http(app(router="a")) as one, serve_http(app(router="b", decode=0)) as two:
        async with serve_http(app(deployment="other")) as pending_peer:
            addresses = ["{}:{}".format(*address) for address in (one, pending_peer, two)] + ["127.0.0.1:1"]
            answers = await asyncio.to_thread(ask_here, "d", addresses, "/health")
            routes = await asyncio.to_thread(ask_here, "d", addresses, "/debug/routes/r%2F1")
            named = await asyncio.to_thread(ask_here, "d", addresses, "/health", is_named=True)
            alone = await asyncio.to_thread(ask_at, addresses[1], "/health")
    assert [answer.json()["router"] for answer in answers] == ["a", "b"]
    assert seen_by(answers) == {"prefill": 2, "decode": 0} and seen_by([]) is None
    assert len(routes) == 2 and len(alone) == 1
    assert [answer.where for answer in answers] == [addresses[0], addresses[2]]
    assert [answer.where for answer in named] == [f"{addresses[i]} on {socket.gethostname()}" for i in (0, 2)]


@pytest.mark.parametrize("name", ["live", "ready", "startup"])
async def test_each_probe_has_its_own_answer(completions: MakeCompletions, name: str) -> None:
    said = dict.fromkeys(("live", "ready", "startup"), True)
    probes = {probe: partial(said.__getitem__, probe) for probe in said}
    app = create_app(completions(FakeTokenService()), access=Access.anybody(), is_healthy=lambda: True, probes=probes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        assert (await client.get(f"/health/{name}")).json() == {"status": "ok"}
        said[name] = False
        answers = {question: (await client.get(f"/health/{question}")).status_code for question in said}
    assert answers == dict.fromkeys(said, 200) | {name: 503}
