"""A deployment whose doors are another's: what its spec may say, where it is, and what must not go before it."""

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
    ("tree", "said"),
    [
        ({"router": {"grpc_port": 4}}, r"router\.grpc_port: not beside router\.doors, for the doors are those of main"),
        ({"router": {"keys": "none", "replicas": 2}}, r"router\.replicas, router\.keys: not beside"),
        ({"tracing": {"otlp_endpoint": "http://a:4318"}}, r"tracing: not beside"),
        ({"name": "main"}, r"router\.doors: main is this deployment itself"),
    ],
)
def test_what_is_the_doors_is_for_their_own_spec_to_say(tree: dict[str, Any], said: str) -> None:
    tree = {"name": "beside", **tree, "router": {"endpoints": "main", **tree.get("router", {})}}
    with pytest.raises(SpecError, match=said):
        check_own(parse_spec(tree))


def test_what_is_its_own_it_may_say() -> None:
    router = {"endpoints": "main", "policy": "prefix", "max_waiting": 5, "backup_tokens": 64, "admin_port": 9000}
    check_own(parse_spec({"name": "beside", "router": router}))


def test_the_doors_are_there_first() -> None:
    with pytest.raises(SpecError, match=r"router\.doors: main is not deployed from here: deploy it first or"):
        owner_state("main")
    remembered("main", deploying=Command.current())
    with pytest.raises(SpecError, match="is not deployed from here"):
        owner_state("main")
    main = remembered("main")
    assert owner_state("main") == main
    remembered("main", local_ray=LocalRay("/tmp/no-such-ray", 1))
    with pytest.raises(SpecError, match="is not deployed from here"):
        owner_state("main")


def test_doors_that_serve_others_are_not_taken_down_before_these(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, stopped = LocalRay("/tmp/one", 1), list[LocalRay]()
    monkeypatch.setattr(deployment.local_ray, "stop", stopped.append)
    main = remembered("main", local_ray=ray)
    remembered("a", lent_ray=ray, endpoints="main")
    remembered("b", lent_ray=ray, endpoints="main")
    remembered("older", lent_ray=LocalRay("/tmp/another", 2), endpoints="main")  # of a Ray that is gone
    said = "main: its doors serve a, b, too; `cluster down --name a` and `cluster down --name b` first, or add --force"
    with pytest.raises(DeployError) as rejected:
        deployment.take_down(main)
    assert str(rejected.value) == said and not stopped and states.load("main")
    states.forget("a")
    states.forget("b")
    check_no_attached(main)
    deployment.take_down(main)
    assert stopped == [ray] and states.load("main") is None


def test_with_force_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, stopped = LocalRay("/tmp/one", 1), list[LocalRay]()
    monkeypatch.setattr(deployment.local_ray, "stop", stopped.append)
    main = remembered("main", local_ray=ray)
    remembered("a", lent_ray=ray, endpoints="main")
    deployment.take_down(main, force=True)
    assert stopped == [ray]


def test_one_whose_ray_has_gone_is_forgotten_without_asking_anybody() -> None:
    attached = remembered("a", lent_ray=LocalRay("/tmp/no-such-ray", 1), endpoints="main")
    assert deployment.take_down(attached) is None
    assert states.load("a") is None
