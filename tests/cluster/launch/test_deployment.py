"""Deployments whose operator has disconnected leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import cluster.launch
from cluster.cli.app import run
from cluster.control.desired_state import Parts
from cluster.control.report import Pools
from cluster.launch import deployment, driver, local_ray, pool_watch, router_admin
from cluster.launch import state as states
from cluster.ray import name_lock
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import DeployError
from tests.support.disks import fill_disk


class BrokenReporter:
    """Reporter whose connection is broken."""

    def say(self, line: str) -> None:
        raise BrokenPipeError

    def show(self, pools: Pools) -> None:
        raise BrokenPipeError


def _spec() -> Spec:
    return parse_spec({"name": "a", "router": {"grpc_port": free_port(), "http_port": free_port()}})


def test_closed_output_removes_the_deployment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped: list[local_ray.LocalRay] = []
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment.preflight, "check_model", lambda spec, say: None)
    monkeypatch.setattr(local_ray, "stop", stopped.append)
    spec = _spec()
    with pytest.raises(BrokenPipeError):
        deployment.deploy(
            spec,
            address=None,
            deadline=time.monotonic(),
            wait_for_nodes=False,
            parts=Parts(),
            reporter=BrokenReporter(),
        )
    assert stopped and states.load("a") is None


def test_closed_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def deploy(*arguments: object, **more: object) -> None:
        raise BrokenPipeError

    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment, "deploy", deploy)
    assert run(["deploy", "1P1D"]) == 2
    assert "output pipe closed; the deployment was removed" in capsys.readouterr().err


class SilentReporter:
    """Reporter that discards everything."""

    def say(self, line: str) -> None: ...

    def show(self, pools: Pools) -> None: ...


def deploy_a() -> states.State:
    end = time.monotonic()
    return deployment.deploy(
        _spec(), address=None, deadline=end, wait_for_nodes=False, parts=Parts(), reporter=SilentReporter()
    )


def test_concurrent_deploy_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the first one fetches the model, no state is stored yet."""

    def check_model(spec: object, say: Callable[[str], None]) -> None:
        with pytest.raises(DeployError, match="a is being deployed by another command"):
            deploy_a()
        raise DeployError("the first has come so far")

    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment.preflight, "check_model", check_model)
    # Failed or rejected commands leave no lock.
    for _ in range(2):
        with pytest.raises(DeployError, match="the first has come so far"):
            deploy_a()


def test_unsaved_deployment_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stopped: list[local_ray.LocalRay] = []
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(deployment.preflight, "check_model", lambda spec, say: None)
    for module, names in (
        (local_ray, "start join"),
        (driver, "connect run_on_each start_controller start_index ask"),
        (name_lock, "take"),
        (pool_watch, "await_ready"),
        (deployment, "router_application"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, lambda *arguments, **more: "")
    serve = SimpleNamespace(start_serve=lambda: None, start_router=lambda *arguments: None)
    # The real one imports Ray Serve.
    monkeypatch.setattr(cluster.launch, "router_app", serve, raising=False)
    monkeypatch.setattr(router_admin, "await_seen", lambda *arguments, **more: fill_disk(monkeypatch))
    monkeypatch.setattr(local_ray, "stop", stopped.append)
    with pytest.raises(DeployError, match=r"state\.json: No space left on device"):
        deploy_a()
    assert stopped and states.load("a") is None
