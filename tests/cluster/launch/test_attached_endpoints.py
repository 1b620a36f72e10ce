"""Attached deployments: allowed settings, lookup of the owner, and order of removal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.launch import deployment
from cluster.launch import state as states
from cluster.launch.attached_endpoints import check_no_attached, check_own, owner_state
from cluster.launch.local_ray import LocalRay
from cluster.launch.state import Command, State
from core.spec.loader import parse_spec
from core.types.errors import DeployError, SpecError


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))


def remembered(name: str, **changes: Any) -> State:
    up = State(name=name, ray_address="127.0.0.1:1", local_ray=None, grpc="a:1", http="http://a:2", deploying=None)
    state = replace(up, **changes)
    states.save(state)
    return state


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (
            {"router": {"grpc_port": 4}},
            r"router\.grpc_port: not allowed with router\.endpoints; set this in the spec of main",
        ),
        ({"router": {"keys": "none", "replicas": 2}}, r"router\.replicas, router\.keys: not allowed with"),
        ({"tracing": {"otlp_endpoint": "http://a:4318"}}, r"tracing: not allowed with"),
        ({"name": "main"}, r"router\.endpoints: main is this deployment"),
    ],
)
def test_endpoint_settings_are_rejected(tree: dict[str, Any], error: str) -> None:
    tree = {"name": "beside", **tree, "router": {"endpoints": "main", **tree.get("router", {})}}
    with pytest.raises(SpecError, match=error):
        check_own(parse_spec(tree))


def test_own_settings_are_allowed() -> None:
    router = {"endpoints": "main", "policy": "prefix", "max_waiting": 5, "backup_tokens": 64, "admin_port": 9000}
    check_own(parse_spec({"name": "beside", "router": router}))


def test_owner_must_be_deployed_first() -> None:
    with pytest.raises(SpecError, match=r"router\.endpoints: main is not deployed from this machine: deploy it first"):
        owner_state("main")
    remembered("main", deploying=Command.current())
    with pytest.raises(SpecError, match="is not deployed from this machine"):
        owner_state("main")
    main = remembered("main")
    assert owner_state("main") == main
    remembered("main", local_ray=LocalRay("/tmp/no-such-ray", 1))
    with pytest.raises(SpecError, match="is not deployed from this machine"):
        owner_state("main")


def test_owner_with_attached_deployments_is_not_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, stopped = LocalRay("/tmp/one", 1), list[LocalRay]()
    monkeypatch.setattr(deployment.local_ray, "stop", stopped.append)
    main = remembered("main", local_ray=ray)
    remembered("a", lent_ray=ray, endpoints="main")
    remembered("b", lent_ray=ray, endpoints="main")
    remembered("older", lent_ray=LocalRay("/tmp/another", 2), endpoints="main")  # of a Ray that has ended
    error = (
        "main: its endpoints also serve a, b; `cluster down --name a` and `cluster down --name b` first, or add --force"
    )
    with pytest.raises(DeployError) as rejected:
        deployment.take_down(main)
    assert str(rejected.value) == error and not stopped and states.load("main")
    states.forget("a")
    states.forget("b")
    check_no_attached(main)
    deployment.take_down(main)
    assert stopped == [ray] and states.load("main") is None


def test_force_takes_the_owner_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, stopped = LocalRay("/tmp/one", 1), list[LocalRay]()
    monkeypatch.setattr(deployment.local_ray, "stop", stopped.append)
    main = remembered("main", local_ray=ray)
    remembered("a", lent_ray=ray, endpoints="main")
    deployment.take_down(main, force=True)
    assert stopped == [ray]


def test_deployment_of_an_ended_ray_is_forgotten() -> None:
    attached = remembered("a", lent_ray=LocalRay("/tmp/no-such-ray", 1), endpoints="main")
    assert deployment.take_down(attached) is None
    assert states.load("a") is None
