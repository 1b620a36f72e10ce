"""Attached deployments: allowed settings, lookup of the owner, and order of removal."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from cluster.launch import deployment
from cluster.launch import state as states
from cluster.launch.attached_endpoints import check_own, owner_state
from cluster.launch.local_ray import LocalRay
from cluster.launch.state import Command
from core.spec.loader import parse_spec
from core.types.errors import DeployError, SpecError
from tests.cluster.deployments import save_state

pytestmark = pytest.mark.usefixtures("state_root")
_NO_RAY = LocalRay("/tmp/no-such-ray", 1)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[LocalRay]:
    """Local Rays that were stopped."""
    found: list[LocalRay] = []
    monkeypatch.setattr(deployment.local_ray, "stop", found.append)
    return found


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
        ({"router": {"policy": "prefix", "max_waiting": 5, "backup_tokens": 64, "admin_port": 9000}}, None),
    ],
)
def test_endpoint_settings_are_rejected_and_own_ones_allowed(tree: dict[str, Any], error: str | None) -> None:
    tree = {"name": "beside", **tree, "router": {"endpoints": "main", **tree.get("router", {})}}
    with pytest.raises(SpecError, match=error) if error else nullcontext():
        check_own(parse_spec(tree))


def test_owner_must_be_deployed_first() -> None:
    for fields in (None, {"deploying": Command.current()}, {"local_ray": _NO_RAY}):
        if fields:
            save_state("main", **fields)
        error = r"router\.endpoints: main is not deployed from this machine: deploy it first"
        with pytest.raises(SpecError, match=error):
            owner_state("main")
    assert save_state("main") == owner_state("main")


def test_owner_with_attached_deployments_is_taken_down_last_or_by_force(stopped: list[LocalRay]) -> None:
    ray = LocalRay("/tmp/one", 1)
    main = save_state("main", local_ray=ray)
    for name, lent_ray in (("a", ray), ("b", ray), ("older", LocalRay("/tmp/another", 2))):  # the last one has ended
        save_state(name, lent_ray=lent_ray, endpoints="main")
    with pytest.raises(DeployError) as rejected:
        deployment.take_down(main)
    downs = "`cluster down --name a` and `cluster down --name b` first, or add --force"
    assert str(rejected.value) == f"main: its endpoints also serve a, b; {downs}"
    assert not stopped and states.load("main")
    deployment.take_down(main, force=True)
    assert stopped == [ray] and states.load("main") is None
    states.forget("a")
    states.forget("b")
    deployment.take_down(save_state("main", local_ray=ray))
    assert stopped == [ray, ray]


def test_deployment_of_an_ended_ray_is_forgotten() -> None:
    assert deployment.take_down(save_state("a", lent_ray=_NO_RAY, endpoints="main")) is None
    assert states.load("a") is None
