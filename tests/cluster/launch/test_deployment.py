"""Deployments whose operator has disconnected leave nothing behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import cluster.launch
from cluster.cli.app import run
from cluster.control.desired_state import Parts
from cluster.launch import deployment, driver, local_ray, router_admin, status
from cluster.launch import state as states
from cluster.ray import name_lock
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.types.errors import DeployError
from tests.support.disks import fill_disk

SILENT: Any = SimpleNamespace(say=lambda line: None, show=lambda pools: None)


@pytest.fixture
def stopped(state_root: object, monkeypatch: pytest.MonkeyPatch) -> list[local_ray.LocalRay]:
    """Local Rays that were stopped. Models are not checked."""
    found: list[local_ray.LocalRay] = []
    monkeypatch.setattr(local_ray, "stop", found.append)
    monkeypatch.setattr(deployment.preflight, "check_model", lambda spec, say: None)
    return found


def deploy_a(reporter: Any = SILENT) -> states.State:
    spec = parse_spec({"name": "a", "router": {"grpc_port": free_port(), "http_port": free_port()}})
    return deployment.deploy(
        spec, address=None, deadline=time.monotonic(), wait_for_nodes=False, parts=Parts(), reporter=reporter
    )


def break_pipe(*arguments: object, **more: object) -> None:
    raise BrokenPipeError


def test_closed_output_removes_the_deployment_and_is_an_error(
    stopped: list[local_ray.LocalRay], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenPipeError):
        deploy_a(SimpleNamespace(say=break_pipe, show=break_pipe))
    assert stopped and states.load("a") is None
    monkeypatch.setattr(deployment, "deploy", break_pipe)
    assert run(["deploy", "1P1D"]) == 2
    assert "output pipe closed; the deployment was removed" in capsys.readouterr().err


def test_concurrent_deploy_is_rejected(state_root: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one fetches the model, no state is stored yet."""

    def check_model(spec: object, say: Callable[[str], None]) -> None:
        with pytest.raises(DeployError, match="a is being deployed by another command"):
            deploy_a()
        raise DeployError("the first has come so far")

    monkeypatch.setattr(deployment.preflight, "check_model", check_model)
    # Failed or rejected commands leave no lock.
    for _ in range(2):
        with pytest.raises(DeployError, match="the first has come so far"):
            deploy_a()


def test_unsaved_deployment_is_removed(stopped: list[local_ray.LocalRay], monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (local_ray, "start join"),
        (driver, "connect run_on_each start_controller start_index ask"),
        (name_lock, "take"),
        (status, "await_ready"),
        (deployment, "router_application"),
    ):
        for name in names.split():
            monkeypatch.setattr(module, name, lambda *arguments, **more: "")
    serve = SimpleNamespace(start_serve=lambda: None, start_router=lambda *arguments: None)
    # The real one imports Ray Serve.
    monkeypatch.setattr(cluster.launch, "router_app", serve, raising=False)
    monkeypatch.setattr(router_admin, "await_seen", lambda *arguments, **more: fill_disk(monkeypatch))
    with pytest.raises(DeployError, match=r"state\.json: No space left on device"):
        deploy_a()
    assert stopped and states.load("a") is None
