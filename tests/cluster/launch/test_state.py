"""What the command line remembers, and what it clears away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.launch import state
from cluster.launch.local_ray import LocalRay
from cluster.launch.preflight import check_is_free, check_ports
from cluster.launch.state import Command, State
from core.process import processes
from core.process.ports import free_port
from core.spec.schema import RouterSpec
from core.types.errors import DeployError, NotDeployed, SpecError
from tests.support.disks import fill_disk


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    return tmp_path


def deployed(name: str, **changes: object) -> State:
    up = State(
        name=name,
        ray_address="10.0.0.1:6379",
        local_ray=None,
        grpc="127.0.0.1:50051",
        http="http://127.0.0.1:8000",
        deploying=None,
    )
    return replace(up, **changes)


def dead_command() -> Command:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    command = Command(child.pid, processes.start_time(child.pid))
    child.communicate(b"\n")
    return command


def test_what_is_saved_is_found_again() -> None:
    saved = deployed("a", local_ray=LocalRay("/tmp/x", 20_123), deploying=Command.current())
    state.save(saved)
    assert state.load("a") == saved == state.find(None) == state.find("a")
    state.forget("a")
    assert state.load("a") is None


def test_what_a_newer_version_has_remembered_beyond_this_is_passed_over() -> None:
    saved = deployed("a", local_ray=LocalRay("/tmp/x", 20_123), deploying=Command.current())
    state.save(saved)
    file = state.state_dir("a") / "state.json"
    tree = json.loads(file.read_text())
    for level in (tree, tree["local_ray"], tree["deploying"]):
        level["of a newer version"] = {"a": [1]}
    file.write_text(json.dumps(tree))
    assert state.load("a") == saved


@pytest.mark.parametrize("left", ["", '{"name": "a", ', "[]", "{}", '{"local_ray": null, "deploying": null}'])
def test_what_is_left_of_a_file_is_named(left: str) -> None:
    state.save(deployed("a"))
    file = state.state_dir("a") / "state.json"
    file.write_text(left)
    for ask in (lambda: state.find(None), lambda: state.load("a"), lambda: check_is_free("a", print)):
        with pytest.raises(
            DeployError, match=f"{file}: it is not what `cluster deploy` has written; see that nothing of a"
        ):
            ask()
    state.forget("a")
    check_is_free("a", print)


def test_what_cannot_be_saved_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state.save(deployed("a"))
    fill_disk(monkeypatch)
    with pytest.raises(DeployError, match=r"state\.json: No space left on device"):
        state.save(deployed("a", grpc="elsewhere"))
    assert state.load("a") == deployed("a")


def test_a_name_is_reserved_once(state_root: Path) -> None:
    with state.reserve("a"), state.reserve("b"):
        with pytest.raises(DeployError, match="a is being deployed by another command"), state.reserve("a"):
            pass
    with state.reserve("a"):
        assert state.deployed_names() == []
    assert list(state_root.iterdir()) == []


def test_a_name_that_was_reserved_meanwhile_is_not_reserved_twice(
    state_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had it removes its lock; who has opened that one before locks what is no longer there."""

    def flock(lock: object, operation: int) -> None:
        (state_root / "a.lock").unlink()
        (state_root / "a.lock").touch()

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(DeployError, match="a is being deployed by another command"), state.reserve("a"):
        pass


def test_where_nothing_can_be_remembered_nothing_is_reserved(state_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state_root / "file").touch()
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(state_root / "file"))
    with pytest.raises(DeployError, match=r"a\.lock: File exists"), state.reserve("a"):
        pass


def test_where_it_remembers_is_one_place_wherever_a_process_stands(
    state_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for said, meant in (("kept", tmp_path / "kept"), ("~/kept", tmp_path / "home" / "kept")):
        monkeypatch.setenv("CLUSTER_STATE_DIR", said)
        assert state.log_dir("a") == meant / "a" / "logs"


def test_one_of_several_must_be_named() -> None:
    with pytest.raises(NotDeployed, match="nothing is deployed"):
        state.find(None)
    state.save(deployed("a"))
    state.save(deployed("b"))
    with pytest.raises(SpecError, match="several deployments are up: a, b; choose one with --name"):
        state.find(None)
    with pytest.raises(NotDeployed, match="c is not deployed"):
        state.find("c")


def test_an_interrupted_deploy_is_recognised() -> None:
    assert not deployed("a", deploying=Command.current()).is_interrupted
    assert deployed("a", deploying=dead_command()).is_interrupted
    reused = Command(os.getpid(), 1)  # our pid, but not our start
    assert deployed("a", deploying=reused).is_interrupted


def test_a_name_that_is_taken_is_refused() -> None:
    state.save(deployed("a"))
    with pytest.raises(DeployError, match="a is deployed already; `cluster scale` resizes it"):
        check_is_free("a", print)
    state.save(deployed("a", deploying=Command.current()))
    with pytest.raises(DeployError, match="a is being deployed"):
        check_is_free("a", print)
    state.save(deployed("a", deploying=dead_command()))
    with pytest.raises(DeployError, match=r"was interrupted on Ray at 10.0.0.1:6379; run `cluster down` first"):
        check_is_free("a", print)


def test_what_a_killed_command_left_is_cleared(tmp_path: Path) -> None:
    local = LocalRay(str(tmp_path / "ray"), free_port())
    left = subprocess.Popen(["sleep", "60"], env={"XPYD_LOCAL_RAY": local.temp_dir}, start_new_session=True)
    state.save(deployed("a", local_ray=local, deploying=dead_command()))
    said: list[str] = []
    check_is_free("a", said.append)
    assert left.wait(5) < 0
    assert state.load("a") is None and said == ["clearing away what is left of an earlier a"]


def test_ports_in_use_are_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = taken.getsockname()[1]
        with pytest.raises(
            DeployError, match=f"HTTP port {http} on 127.0.0.1 is in use; choose another with --http-port"
        ):
            check_ports(RouterSpec(grpc_port=free_port(), http_port=http), "127.0.0.1")
    with pytest.raises(SpecError, match=r"router.http_port: 7000 is router.grpc_port, too"):
        check_ports(RouterSpec(grpc_port=7000, http_port=7000), "127.0.0.1")
