"""View of one router's replicas as they join and leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from core.rpc.worker_pb2 import Status, Totals
from core.types.request import Role
from router.routing.decisions import Decisions
from router.serving.flows import Flows
from router.telemetry.metrics import Metrics
from router.telemetry.view import RouterView
from tests.support.members import make_member


@dataclass
class FakeSeenReplica:
    """Stand-in for the part of router.serving.replica.Replica that the view reads."""

    id: str
    role: Role
    is_alive: bool = True
    status: Status = field(default_factory=Status)

    @property
    def member(self) -> Any:
        return make_member(self.id)


def _view(replicas: list[FakeSeenReplica], flows: Flows | None = None) -> RouterView:
    seen: Any = replicas
    return RouterView(
        deployment="d",
        router="router-0",
        replicas=seen,
        metrics=Metrics(),
        decisions=Decisions(),
        flows=flows or Flows(),
    )


def shown_replicas(statuses: Mapping[str, Status]) -> list[dict[str, Any]]:
    """Return the replicas as a router shows them. statuses: by the name of the replica."""
    seen = [FakeSeenReplica(id, Role(id.partition("-")[0]), status=status) for id, status in statuses.items()]
    shown: list[dict[str, Any]] = _view(seen).now()["replicas"]
    return shown


def test_replicas_that_come_and_go_are_told_once() -> None:
    old, new = FakeSeenReplica("decode-2", Role.DECODE), FakeSeenReplica("decode-10", Role.DECODE, is_alive=False)
    replicas = [old]
    view = _view(replicas)
    view.take()
    assert not view.now()["events"], "replicas present at the start give no event"
    replicas.append(new)
    view.take()
    assert [one["state"] for one in view.now()["replicas"]] == ["joining", "ready"], "those of interest come first"
    new.is_alive = True
    view.take()
    old.is_alive = False
    assert [(one["id"], one["state"]) for one in view.now()["replicas"]] == [
        ("decode-2", "lost"),
        ("decode-10", "ready"),
    ]
    view.take()
    new.status.draining = True
    view.take()
    replicas.clear()
    view.take()
    view.take()
    shown = [(one["replica"], one["text"]) for one in reversed(view.now()["events"])]
    assert shown == [
        ("decode-10", "is joining"),
        ("decode-10", "is ready"),
        ("decode-2", "is lost"),
        ("decode-10", "is draining"),
        ("decode-2", "is gone"),
        ("decode-10", "is gone"),
    ]


def test_reuse_is_shown_if_known() -> None:
    totals = Totals(prompt_tokens=100, prefix_hit_tokens=25)
    prefill = FakeSeenReplica("prefill-0", Role.PREFILL, status=Status(totals=totals))
    decode = FakeSeenReplica("decode-1", Role.DECODE, status=Status(totals=totals))
    shown = {one["id"]: one["reused"] for one in _view([prefill, decode]).now()["replicas"]}
    assert shown == {"prefill-0": 0.25, "decode-1": None}, "a decode replica receives prompts as well"


def test_flows_between_two_replicas_are_summed() -> None:
    flows = Flows()
    for num_bytes in (1000, 4000):
        flows.add("handoff", "prefill-0", "decode-1", num_bytes)
    flows.add("pull", "decode-1", "prefill-0", 10_000)
    fetch, handoff = _view([], flows).now()["flows"]
    assert (fetch["kind"], fetch["source"], handoff["bytes_per_s"]) == ("pull", "decode-1", 1000.0)


def test_the_number_of_listed_replicas_is_bounded() -> None:
    replicas = [FakeSeenReplica(f"decode-{number}", Role.DECODE) for number in range(300)]
    replicas[299].is_alive = False
    shown = _view(replicas).now()
    assert shown["num_replicas"] == 300 and len(shown["replicas"]) == 256 and shown["replicas"][0]["id"] == "decode-299"
