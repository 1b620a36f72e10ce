"""Attached deployments: allowed settings, lookup of the owner, their records in Ray's store, and order of removal."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from cluster.control import desired_state
from cluster.control.desired_state import Desired
from cluster.launch import deployment
from cluster.launch import state as states
from cluster.launch.attached_endpoints import AttachedList, attach, check_own, owner_state
from cluster.launch.local_ray import LocalRay
from cluster.launch.state import DeployProcess
from cluster.ray import name_lock, store
from cluster.ray.name_lock import NameLock
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import DeployError, SpecError
from core.types.launch import Launch
from tests.cluster.deployments import make_launch, save_state

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
    for fields in (None, {"deploying": DeployProcess.current()}, {"local_ray": _NO_RAY}):
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


def spec_of(name: str, *, model: str, **router: object) -> Spec:
    return parse_spec({"name": name, "model": {"served_name": model}, "router": router})


def stored(spec: Spec) -> Launch:
    """Store the desired state of a deployment, as its controller does."""
    launch = replace(make_launch(), spec=spec)
    if name_lock.find(spec.name) is None:
        name_lock.take(spec.name, NameLock.new("ann"))
    desired_state.save(Desired(launch=launch))
    return launch


def names(attached: AttachedList) -> list[str]:
    return [launch.spec.name for launch in attached.launches()]


def test_list_follows_the_current_deployments(ray_store: object) -> None:
    stored(spec_of("main", model="m", grpc_port=4001, keys="required", replicas=2))
    attached = AttachedList("main")
    assert attached.launches() == []
    first = stored(spec_of("a", model="x", endpoints="main"))
    stored(spec_of("b", model="y"))
    assert [launch.credentials for launch in attached.launches()] == [first.credentials]
    assert attached.launches()[0] is attached.launches()[0], "what has not changed is not read again"
    again = stored(spec_of("a", model="x", endpoints="main"))
    assert [launch.credentials for launch in attached.launches()] == [again.credentials]
    stored(spec_of("b", model="y", endpoints="main"))
    assert names(AttachedList("main")) == ["a", "b"] and names(AttachedList("a")) == []
    store.delete(store.namespace("a"), "desired")
    assert names(AttachedList("main")) == ["b"]


def test_unreadable_record_affects_only_its_deployment(ray_store: dict[tuple[str, str], bytes]) -> None:
    for name in ("a", "b", "c", "d"):
        stored(spec_of(name, model=name, endpoints="main"))

    def from_a_newer_version(name: str) -> None:
        tree = json.loads(ray_store[store.namespace(name), "desired"])
        tree["spec"]["router"]["what_came_later"] = 1
        ray_store[store.namespace(name), "desired"] = json.dumps(tree).encode()

    from_a_newer_version("b")
    ray_store[store.namespace("c"), "desired"] = b"[]"
    attached = AttachedList("main")
    assert names(attached) == ["a", "d"]
    from_a_newer_version("d")
    assert names(attached) == ["a", "d"], "as it was when it could be read"


def test_endpoint_settings_come_from_the_owner(ray_store: object) -> None:
    with pytest.raises(SpecError, match=r"router\.endpoints: main is not deployed on this Ray; deploy it first"):
        attach(spec_of("a", model="x", endpoints="main"))
    stored(spec_of("main", model="m", grpc_port=4001, keys="required", replicas=2))
    router = attach(spec_of("a", model="x", endpoints="main", policy="prefix", admin_port=9000))
    assert (router.endpoints, router.grpc_port, router.keys, router.replicas) == ("main", 4001, "required", 2)
    assert (router.policy, router.admin_ports) == ("prefix", [9000, 9001, 9002, 9003])
    with pytest.raises(SpecError, match=r"model\.served_name: m is already served by main at these endpoints"):
        attach(spec_of("a", model="m", endpoints="main"))
    stored(spec_of("a", model="x", endpoints="main"))
    with pytest.raises(SpecError, match="is already served by a at these endpoints"):
        attach(spec_of("b", model="x", endpoints="main"))
    with pytest.raises(SpecError, match=r"router\.endpoints: a has no endpoints of its own; name main instead"):
        attach(spec_of("b", model="y", endpoints="a"))
