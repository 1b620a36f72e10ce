"""State files of the command line, and their cleanup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.launch import state
from cluster.launch.local_ray import LocalRay
from cluster.launch.preflight import check_is_free
from cluster.launch.state import DeployProcess
from core.process import processes
from core.process.ports import free_port
from core.types.errors import DeployError, NotDeployed, SpecError
from tests.cluster.deployments import save_state

pytestmark = pytest.mark.usefixtures("state_root")


@pytest.fixture
def file(state_root: Path) -> Path:
    """State file of deployment `a`."""
    return state_root / "a" / "state.json"


def dead_process() -> DeployProcess:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = DeployProcess(child.pid, processes.start_time(child.pid))
    child.communicate(b"\n")
    return process


def test_round_trip_ignores_unknown_fields(file: Path) -> None:
    saved = save_state(local_ray=LocalRay("/tmp/x", 20_123), deploying=DeployProcess.current())
    assert state.load("a") == saved == state.find(None) == state.find("a")
    tree = json.loads(file.read_text())
    for level in (tree, tree["local_ray"], tree["deploying"]):
        level["of a newer version"] = {"a": [1]}
    file.write_text(json.dumps(tree))
    assert state.load("a") == saved
    state.forget("a")
    assert state.load("a") is None


@pytest.mark.parametrize("left", ["", '{"name": "a", ', "[]", "{}", '{"local_ray": null, "deploying": null}'])
def test_truncated_file_is_an_error(left: str, file: Path) -> None:
    save_state()
    file.write_text(left)
    for ask in (lambda: state.find(None), lambda: state.load("a"), lambda: check_is_free("a", print)):
        with pytest.raises(DeployError, match=f"{file}: not a state file of `cluster deploy`; check that nothing of a"):
            ask()
    state.forget("a")
    check_is_free("a", print)


def test_state_directory_is_writable_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(DeployError, match=r"a\.lock: File exists"), state.reserve("a"):
        pass
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, meant in (("kept", tmp_path / "kept"), ("~/kept", tmp_path / "home" / "kept")):
        monkeypatch.setenv("CLUSTER_STATE_DIR", given)
        assert state.log_dir("a") == meant / "a" / "logs"


def test_one_of_several_must_be_chosen() -> None:
    with pytest.raises(NotDeployed, match="nothing is deployed"):
        state.find(None)
    save_state("a")
    save_state("b")
    with pytest.raises(SpecError, match="several deployments are up: a, b; choose one with --name"):
        state.find(None)
    with pytest.raises(NotDeployed, match="c is not deployed"):
        state.find("c")


@pytest.mark.parametrize(
    ("process", "is_interrupted", "error"),
    [
        (lambda: None, False, "a is deployed already; `cluster scale` resizes it"),
        (DeployProcess.current, False, "a is being deployed"),
        (dead_process, True, r"was interrupted on Ray at 10.0.0.1:6379; run `cluster down` first"),
        (lambda: DeployProcess(os.getpid(), 1), True, "was interrupted"),
    ],
    ids=["deployed", "deploying", "dead", "another process with the same pid"],
)
def test_taken_name_is_rejected(process: Callable[[], DeployProcess | None], is_interrupted: bool, error: str) -> None:
    assert save_state(deploying=process()).is_interrupted is is_interrupted
    with pytest.raises(DeployError, match=error):
        check_is_free("a", print)


def test_leftovers_of_a_killed_command_are_removed(tmp_path: Path) -> None:
    local = LocalRay(str(tmp_path / "ray"), free_port())
    left = subprocess.Popen(["sleep", "60"], env={"XPYD_LOCAL_RAY": local.temp_dir}, start_new_session=True)
    save_state(local_ray=local, deploying=dead_process())
    messages: list[str] = []
    check_is_free("a", messages.append)
    assert left.wait(5) < 0
    assert state.load("a") is None and messages == ["removing leftovers of an earlier a"]
