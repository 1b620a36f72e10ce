"""Placement of a replica's ranks, and the pool's memory of failed starts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control import gang
from cluster.control import pool as pool_module
from cluster.control.desired_state import Desired
from cluster.control.gang import Gang
from cluster.control.placement import Node
from cluster.control.pool import Goal, ReplicaPool
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.types.errors import ReplicaFailed
from core.types.request import Role
from tests.cluster.deployments import make_desired


@pytest.mark.parametrize(("failures", "chosen"), [({}, "a"), ({"host-a": 1}, "b"), ({"host-a": 1, "host-b": 2}, "a")])
async def test_node_with_failed_starts_comes_last(
    monkeypatch: pytest.MonkeyPatch, failures: dict[str, int], chosen: str
) -> None:
    """It has no replica and the most room, so it would be chosen until the pool gives up."""
    selectors: list[list[dict[str, str]]] = []

    def reserve(bundles: object, *, bundle_label_selector: list[dict[str, str]], **more: Any) -> Any:
        selectors.append(bundle_label_selector)
        return SimpleNamespace(wait=lambda timeout_s: True)

    room = {"CPU": 8.0}
    nodes = [Node(id=name, name=f"host-{name}", ip="10.0.0.1", total=room, available=room) for name in "ab"]
    monkeypatch.setattr(gang, "live_nodes", lambda: nodes)
    monkeypatch.setattr(gang, "placement_group", reserve)
    monkeypatch.setattr(gang, "placement_group_table", lambda *group: {"bundles_to_node_id": {0: "a"}} if group else {})
    await Gang("decode-1", make_desired(), failures=failures).place(lambda why: None)
    assert [selector["ray.io/node-id"] for [selector] in selectors] == [chosen]


async def test_pool_remembers_failed_starts_while_a_replica_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other replicas have served for long."""
    seen_failures: list[Mapping[str, int]] = []

    class Timeline(ReplicaLifecycle):
        def __init__(self, replica: str, desired: Desired, *, failures: Mapping[str, int]) -> None:
            super().__init__(replica, desired, failures=failures)
            seen_failures.append(failures)
            self.view.node = "host-a"
            self.serving_since = None if seen_failures[1:] else 0.0

        async def live(self) -> None:
            if self.serving_since is None:
                raise ReplicaFailed("its disk is full")
            await asyncio.Event().wait()

    # Each reading of the clock is much later.
    now = itertools.count(1000.0, 100.0)
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(pool_module, "ReplicaLifecycle", Timeline)
    changed = asyncio.Event()
    pool, numbers = ReplicaPool(Role.DECODE, changed=changed.set), itertools.count()
    # The first replica serves, all others fail.
    for count in (1, 2, 2):
        changed.clear()
        pool.reconcile({1: Goal(make_desired(), count)}, lambda make: f"decode-{next(numbers)}")
        if count > 1:
            await changed.wait()
    assert seen_failures == [{}, {}, {"host-a": 1}]
    await pool.stop()
