"""Attached deployments, as recorded in Ray's store."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.control import desired_state
from cluster.control.desired_state import Desired
from cluster.launch.attached_endpoints import AttachedList, attach
from cluster.ray import name_lock, store
from cluster.ray.name_lock import NameLock
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.launch import Launch
from tests.cluster.deployments import make_launch


def spec_of(name: str, *, model: str, **router: object) -> Spec:
    return parse_spec({"name": name, "model": {"served_name": model}, "router": router})


def stored(spec: Spec) -> Launch:
    launch = replace(make_launch(), spec=spec)
    if name_lock.find(spec.name) is None:
        name_lock.take(spec.name, NameLock.new("ann"))
    desired_state.save(Desired(launch=launch))
    return launch


def attached_to(name: str) -> list[str]:
    return sorted(launch.spec.name for launch in AttachedList(name).launches())


def forget(name: str) -> None:
    store.delete(store.namespace(name), "desired")


@pytest.fixture
def names(three_nodes: str) -> Iterator[list[str]]:
    made = [f"t{uuid.uuid4().hex[:8]}" for _ in range(3)]
    yield made
    for name in made:
        forget(name)
        name_lock.give_up(name)


def test_list_follows_the_current_deployments(names: list[str]) -> None:
    main, a, b = names
    stored(spec_of(main, model="m", grpc_port=4001, keys="required", replicas=2))
    attached_deployments = AttachedList(main)
    assert attached_deployments.launches() == []
    first = stored(spec_of(a, model="x", endpoints=main))
    stored(spec_of(b, model="y"))
    assert [launch.credentials for launch in attached_deployments.launches()] == [first.credentials]
    assert attached_deployments.launches()[0] is attached_deployments.launches()[0], (
        "what has not changed is not read again"
    )
    again = stored(spec_of(a, model="x", endpoints=main))
    assert [launch.credentials for launch in attached_deployments.launches()] == [again.credentials]
    stored(spec_of(b, model="y", endpoints=main))
    assert attached_to(main) == sorted([a, b]) and attached_to(a) == []
    forget(a)
    assert attached_to(main) == [b]
    newer = json.dumps({"spec": {"router": {"endpoints": main, "newer": 1}}})
    store.put(store.namespace(a), "desired", newer)
    assert attached_to(main) == [b], "an unreadable record hides no other deployment"


def test_endpoint_settings_come_from_the_owner(names: list[str]) -> None:
    main, a, b = names
    with pytest.raises(SpecError, match=rf"router\.endpoints: {main} is not deployed on this Ray; deploy it first"):
        attach(spec_of(a, model="x", endpoints=main))
    stored(spec_of(main, model="m", grpc_port=4001, keys="required", replicas=2))
    router = attach(spec_of(a, model="x", endpoints=main, policy="prefix", admin_port=9000))
    assert (router.endpoints, router.grpc_port, router.keys, router.replicas) == (main, 4001, "required", 2)
    assert (router.policy, router.admin_ports) == ("prefix", [9000, 9001, 9002, 9003])
    with pytest.raises(SpecError, match=rf"model\.served_name: m is already served by {main} at these endpoints"):
        attach(spec_of(a, model="m", endpoints=main))
    stored(spec_of(a, model="x", endpoints=main))
    with pytest.raises(SpecError, match=rf"is already served by {a} at these endpoints"):
        attach(spec_of(b, model="x", endpoints=main))
    with pytest.raises(SpecError, match=rf"router\.endpoints: {a} has no endpoints of its own; name {main} instead"):
        attach(spec_of(b, model="y", endpoints=a))


def test_unreadable_record_affects_only_its_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    def text_of(name: str) -> bytes:
        launch = replace(make_launch(), spec=spec_of(name, model=name, endpoints="main"))
        return Desired(launch=launch).to_json().encode()

    def newer(text: bytes) -> bytes:
        tree = json.loads(text)
        tree["spec"]["router"]["what_came_later"] = 1
        return json.dumps(tree).encode()

    store = {"a": text_of("a"), "b": newer(text_of("b")), "c": b"[]", "d": text_of("d")}
    monkeypatch.setattr(name_lock, "claimed", lambda: list(store))
    monkeypatch.setattr(desired_state, "stored", store.get)
    attached_deployments = AttachedList("main")
    assert [launch.spec.name for launch in attached_deployments.launches()] == ["a", "d"]
    store["d"] = newer(store["d"])
    assert [launch.spec.name for launch in attached_deployments.launches()] == ["a", "d"], (
        "as it was when it could be read"
    )
