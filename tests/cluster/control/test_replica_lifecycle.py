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
from cluster.control.pool import ReplicaPool
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.rollout.update import Update, UpdateOptions
from cluster.rollout.updater import Updater
from core.types.errors import ReplicaFailed
from core.types.request import Role
from tests.cluster.deployments import make_desired
from tests.support.waiting import WITHIN_S, becomes

BINDING = {"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"}
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
            return [BINDING] * 2
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


@pytest.fixture
def gangs(monkeypatch: pytest.MonkeyPatch) -> list[FakeGang]:
    """The gang of each new replica."""
    made: list[FakeGang] = []

    def make(replica: str, desired: Desired, failures: Mapping[str, int]) -> FakeGang:
        made.append(FakeGang())
        return made[-1]

    monkeypatch.setattr(replica_lifecycle, "Gang", make)
    return made


@pytest.mark.parametrize(("stage", "at"), [("", ""), ("reading weights", ", at 'reading weights'")])
async def test_start_timeout_is_explained(
    gangs: list[FakeGang], monkeypatch: pytest.MonkeyPatch, stage: str, at: str
) -> None:
    monkeypatch.setattr(FakeGang, "stage", stage)
    with pytest.raises(ReplicaFailed) as failure:
        await ReplicaLifecycle("prefill-0", make_desired({"timeouts": {"start_s": 0.1}})).live()
    assert str(failure.value) == f"not ready 0.1 s after placement (timeouts.start_s){at}"
    assert failure.value.will_repeat and [gang.is_removed for gang in gangs] == [True]


def fake_ray(monkeypatch: pytest.MonkeyPatch, ranks: list[FakeRank]) -> None:
    """Let gangs find these actors, on one node."""
    monkeypatch.setattr(gang, "get_placement_group", lambda name: None)
    monkeypatch.setattr(gang, "placement_group_table", lambda group: {"bundles_to_node_id": {0: "a node"}})
    monkeypatch.setattr(gang, "live_nodes", list)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: ranks[int(name[-1])])


class Adopted:
    """Pool with a replica of one such rank, started by an earlier run of the controller."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = FakeRank()
        # Whether it was serving.
        self.removed: list[bool] = []
        self.pool = ReplicaPool(Role.DECODE, changed=lambda: None)

        async def remove(gang: Gang, *, is_serving: bool) -> None:
            self.removed.append(is_serving)

        monkeypatch.setattr(Gang, "remove", remove)
        fake_ray(monkeypatch, [self.rank])

    async def join(self, *, make: int = 1) -> None:
        life = ReplicaLifecycle("decode-0", make_desired())
        adoption = asyncio.create_task(life.adopt())
        await self.rank.answer("bind", BINDING)
        await self.rank.answer("status", STATUS)
        await adoption
        self.pool.add(life, make)


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


async def test_adopted_replicas_count_as_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, at the end of an update, a restarted controller would start the old revision again and send all
    requests there, until it counts its own replicas as seen."""
    adopted = Adopted(monkeypatch)
    await adopted.join(make=2)
    pools = {Role.PREFILL: ReplicaPool(Role.PREFILL, changed=lambda: None), Role.DECODE: adopted.pool}
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

    def __init__(self) -> None:
        self.life = ReplicaLifecycle("prefill-1", make_desired({"timeouts": {"start_s": 1.0}}), was="decode-1")
        self.living = asyncio.create_task(self.life.live())

    async def waits(self) -> WaitingSuccessor:
        await becomes(lambda: self.life.view.stage == "waits for decode-1 to drain")
        return self

    async def cancel(self) -> None:
        self.living.cancel()
        await asyncio.gather(self.living, return_exceptions=True)


async def test_successor_without_gang_starts_normally(gangs: list[FakeGang]) -> None:
    successor = await WaitingSuccessor().waits()
    assert not successor.life.inherit(None)
    with pytest.raises(ReplicaFailed, match="not ready 1 s after placement"):
        await successor.living
    assert gangs[0].is_removed


async def test_cancelled_successor_takes_no_gang_and_removes_an_inherited_one(gangs: list[FakeGang]) -> None:
    successor, gang = await WaitingSuccessor().waits(), FakeGang()
    await successor.cancel()
    assert not successor.life.inherit(gang), "the caller removes it"  # type: ignore[arg-type]
    successor = await WaitingSuccessor().waits()
    assert successor.life.inherit(gang) and not gang.is_removed  # type: ignore[arg-type]
    await successor.cancel()
    assert gang.is_removed


async def test_gang_that_fails_to_switch_is_removed(gangs: list[FakeGang]) -> None:
    """Its process was killed, or could not free everything."""
    successor, gang = await WaitingSuccessor().waits(), FakeGang()

    async def become(replica: str, desired: Desired) -> None:
        assert replica == "prefill-1"
        raise ReplicaFailed("the process of rank 0 died: killed")

    gang.become = become  # type: ignore[attr-defined]
    assert successor.life.inherit(gang)  # type: ignore[arg-type]
    with pytest.raises(ReplicaFailed, match="died: killed"):
        await successor.living
    assert gang.is_removed


@pytest.mark.parametrize(("ids", "whole"), [(["prefill-3", "prefill-3"], True), (["decode-0", "prefill-3"], False)])
async def test_partial_switch_is_not_adopted(monkeypatch: pytest.MonkeyPatch, ids: list[str], whole: bool) -> None:
    """The controller died while the ranks switched one after the other."""
    ranks = [FakeRank(), FakeRank()]
    fake_ray(monkeypatch, ranks)
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
        await rank.answer("bind", BINDING)
    await ranks[0].answer("status", STATUS)
    await adoption
    assert (life.view.id, life.view.role, life.gang) == ("prefill-3", Role.PREFILL, "decode-0")
