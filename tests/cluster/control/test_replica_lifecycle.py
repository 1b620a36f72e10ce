"""Replica lifecycle with gangs without processes: slow and stopped starts, adoption, role switches."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.control import gang, replica_lifecycle
from cluster.control.desired_state import Desired
from cluster.control.gang import Gang
from cluster.control.pool import ReplicaPool, RolePools
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.rollout.update import Update, UpdateOptions
from cluster.rollout.updater import Updater
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.types.errors import ReplicaFailed
from core.types.launch import Launch
from core.types.request import Role
from tests.support.waiting import WITHIN_S, becomes

STATUS = {"state": "ready", "running": 0, "waiting": 0, "blocks": {"total": 1, "free": 1, "cached": 0}}


class FakeGang:
    """Gang that is placed at once and stops at the given stage; "": its processes do not start."""

    home = None
    stage = ""

    def __init__(self) -> None:
        self.is_removed = False

    async def place(self, waiting: Callable[[str], None]) -> None:
        pass

    def spawn(self) -> None:
        pass

    async def ask_all(self, method: str, *args: Any, within_s: float | None = None) -> list[Any]:
        if method == "progress":
            return [{"stage": self.stage, "fraction": 0.5}, {"stage": "ready", "fraction": 1.0}]
        if method == "bind" and self.stage:
            return [{"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"}] * 2
        await asyncio.Event().wait()
        raise AssertionError

    async def remove(self, *, is_serving: bool) -> None:
        assert not is_serving
        self.is_removed = True


class FakeRank:
    """Actor handle whose calls are answered by the test."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, asyncio.Queue[asyncio.Future[Any]]] = defaultdict(asyncio.Queue)

    def __getattr__(self, method: str) -> Any:
        def remote() -> asyncio.Future[Any]:
            answer = asyncio.get_running_loop().create_future()
            self._calls[method].put_nowait(answer)
            return answer

        call = SimpleNamespace(remote=remote)
        return SimpleNamespace(options=lambda concurrency_group: call)

    async def answer(self, method: str, answer: Any) -> None:
        """Answer the next call of a method."""
        (await self._calls[method].get()).set_result(answer)


def make_desired(spec: dict[str, Any]) -> Desired:
    return Desired(launch=Launch(spec=parse_spec(spec), log_dir="", credentials=DeploymentSecrets.new(index_url="")))


@pytest.mark.parametrize(("stage", "at"), [("", ""), ("reading weights", ", at 'reading weights'")])
async def test_start_timeout_is_explained(monkeypatch: pytest.MonkeyPatch, stage: str, at: str) -> None:
    gangs: list[FakeGang] = []

    def make(replica: str, desired: Desired, failures: Mapping[str, int]) -> FakeGang:
        gangs.append(FakeGang())
        gangs[-1].stage = stage
        return gangs[-1]

    monkeypatch.setattr(replica_lifecycle, "Gang", make)
    desired = make_desired({"timeouts": {"start_s": 0.1}})
    with pytest.raises(ReplicaFailed) as failure:
        await ReplicaLifecycle("prefill-0", desired).live()
    assert str(failure.value) == f"not ready 0.1 s after placement (timeouts.start_s){at}"
    assert failure.value.will_repeat
    assert [gang.is_removed for gang in gangs] == [True]


class Adopted:
    """Replica of one such rank, started by an earlier run of the controller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: ReplicaPool | None = None) -> None:
        self.rank = FakeRank()
        # Whether it was serving.
        self.removed: list[bool] = []
        self.pool = pool or ReplicaPool(Role.DECODE, changed=lambda: None)

        async def remove(gang: Gang, *, is_serving: bool) -> None:
            self.removed.append(is_serving)

        monkeypatch.setattr(Gang, "remove", remove)
        monkeypatch.setattr(gang, "get_placement_group", lambda name: None)
        monkeypatch.setattr(gang, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a node"}})
        monkeypatch.setattr(gang, "live_nodes", list)
        monkeypatch.setattr(ray, "get_actor", lambda name, namespace: self.rank)

    async def join(self) -> None:
        life = ReplicaLifecycle("decode-0", make_desired({}))
        adoption = asyncio.create_task(life.adopt())
        await self.rank.answer("bind", {"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"})
        await self.rank.answer("status", STATUS)
        await adoption
        self.pool.add(life)


async def test_late_answer_does_not_stop_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = Adopted(monkeypatch)
    await adopted.join()
    # Not processed yet.
    await adopted.rank.answer("status", STATUS)
    async with asyncio.timeout(WITHIN_S):
        await adopted.pool.stop()
    assert adopted.removed == [True] and not adopted.pool.ids


async def test_surplus_adopted_replica_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = Adopted(monkeypatch)
    await adopted.join()
    # Before it has run at all.
    adopted.pool.retire("decode-0")
    async with asyncio.timeout(WITHIN_S):
        await adopted.rank.answer("status", STATUS)
        await adopted.rank.answer("drain", None)
        await adopted.rank.answer("status", STATUS | {"state": "drained"})
        await becomes(lambda: not adopted.pool.ids)
    assert adopted.removed == [True]


async def test_adopted_replicas_count_as_ready_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, at the end of an update, a restarted controller would start the old revision again and send all
    requests there, until it counts its own replicas as seen."""
    pools = {role: RolePools(role, changed=lambda: None) for role in Role}
    adopted = Adopted(monkeypatch, pools[Role.DECODE].of(2))
    await adopted.join()
    desired = make_desired({"decode": {"replicas": 1}})
    options = UpdateOptions(waits_for_nodes=True)
    desired.update = Update(revision=2, spec=desired.spec, roles=frozenset({Role.DECODE}), options=options)
    reporter: Any = SimpleNamespace(counts={})
    goals = Updater(pools, reporter=reporter, save=lambda: None).goals(desired)
    assert {make: goal.count for make, goal in goals[Role.DECODE].items()} == {2: 1}
    assert desired.last_update == "revision 2 serves"
    await adopted.pool.stop()


class WaitingSuccessor:
    """Replica that waits for another one's gang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gangs: list[FakeGang] = []
        monkeypatch.setattr(replica_lifecycle, "Gang", self._make)
        self.life = ReplicaLifecycle("prefill-1", make_desired({"timeouts": {"start_s": 1.0}}), was="decode-1")
        self.living = asyncio.create_task(self.life.live())

    def _make(self, replica: str, desired: Desired, failures: Mapping[str, int]) -> FakeGang:
        self.gangs.append(FakeGang())
        return self.gangs[-1]


async def test_successor_without_gang_starts_normally(monkeypatch: pytest.MonkeyPatch) -> None:
    successor = WaitingSuccessor(monkeypatch)
    await becomes(lambda: successor.life.view.stage == "waits for decode-1 to drain")
    assert not successor.life.inherit(None)
    with pytest.raises(ReplicaFailed, match="not ready 1 s after placement"):
        await successor.living
    assert successor.gangs[0].is_removed


async def test_cancelled_successor_takes_no_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    successor, gang = WaitingSuccessor(monkeypatch), FakeGang()
    await becomes(lambda: successor.life.view.stage)
    successor.living.cancel()
    await asyncio.gather(successor.living, return_exceptions=True)
    assert not successor.life.inherit(gang), "the caller removes it"


async def test_successor_removes_inherited_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    successor, gang = WaitingSuccessor(monkeypatch), FakeGang()
    await becomes(lambda: successor.life.view.stage)
    assert successor.life.inherit(gang)
    successor.living.cancel()
    await asyncio.gather(successor.living, return_exceptions=True)
    assert gang.is_removed


async def test_gang_that_fails_to_switch_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was killed, or could not free everything."""
    successor, gang = WaitingSuccessor(monkeypatch), FakeGang()

    async def become(replica: str, desired: Desired) -> None:
        assert replica == "prefill-1"
        raise ReplicaFailed("the process of rank 0 died: killed")

    gang.become = become  # type: ignore[attr-defined]
    await becomes(lambda: successor.life.view.stage)
    assert successor.life.inherit(gang)  # type: ignore[arg-type]
    with pytest.raises(ReplicaFailed, match="died: killed"):
        await successor.living
    assert gang.is_removed


@pytest.mark.parametrize(("ids", "whole"), [(["prefill-3", "prefill-3"], True), (["decode-0", "prefill-3"], False)])
async def test_partial_switch_is_not_adopted(monkeypatch: pytest.MonkeyPatch, ids: list[str], whole: bool) -> None:
    """The controller died while the ranks switched one after the other."""
    ranks = [FakeRank(), FakeRank()]
    monkeypatch.setattr(gang, "get_placement_group", lambda name: None)
    monkeypatch.setattr(gang, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a node"}})
    monkeypatch.setattr(gang, "live_nodes", list)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: ranks[int(name[-1])])
    desired = make_desired({"prefill": {"tensor_parallel": 2}, "decode": {"tensor_parallel": 2}})
    desired.switched["decode-0"] = "prefill-3"
    life = ReplicaLifecycle("decode-0", desired)
    adoption = asyncio.create_task(life.adopt())
    for rank, id in zip(ranks, ids, strict=True):
        await rank.answer("replica", id)
    if not whole:
        with pytest.raises(ReplicaFailed, match="incomplete: its ranks are of decode-0 and of prefill-3"):
            await adoption
        return
    for rank in ranks:
        await rank.answer("bind", {"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"})
    await ranks[0].answer("status", STATUS)
    await adoption
    assert (life.view.id, life.view.role, life.gang) == ("prefill-3", Role.PREFILL, "decode-0")
