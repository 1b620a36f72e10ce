"""The life of a replica whose gang holds no process: how a start that takes too long, and one that is stopped, end."""

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
from cluster.rollout.role_pools import RolePools
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
    """Is placed at once, and never gets further than the stage given: "" for one whose processes do not even start."""

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
    """An actor's handle; each call is answered when the test says so."""

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
        """The next call of it."""
        (await self._calls[method].get()).set_result(answer)


def make_desired(spec: dict[str, Any]) -> Desired:
    return Desired(launch=Launch(spec=parse_spec(spec), log_dir="", credentials=DeploymentSecrets.new(index_url="")))


@pytest.mark.parametrize(("stage", "at"), [("", ""), ("reading weights", ", at 'reading weights'")])
async def test_a_start_that_takes_too_long_is_explained(monkeypatch: pytest.MonkeyPatch, stage: str, at: str) -> None:
    gangs: list[FakeGang] = []

    def make(replica: str, desired: Desired, failures: Mapping[str, int]) -> FakeGang:
        gangs.append(FakeGang())
        gangs[-1].stage = stage
        return gangs[-1]

    monkeypatch.setattr(replica_lifecycle, "Gang", make)
    desired = make_desired({"timeouts": {"start_s": 1.0}})
    with pytest.raises(ReplicaFailed) as failure:
        await ReplicaLifecycle("prefill-0", desired).live()
    assert str(failure.value) == f"not ready 1 s after it was placed (timeouts.start_s){at}"
    assert failure.value.will_repeat
    assert [gang.is_removed for gang in gangs] == [True]


class Adopted:
    """A replica of one such rank, which an earlier life of the controller started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: ReplicaPool | None = None) -> None:
        self.rank = FakeRank()
        self.removed: list[bool] = []  # whether it was serving
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


async def test_a_replica_that_answers_just_as_it_is_removed_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = Adopted(monkeypatch)
    await adopted.join()
    await adopted.rank.answer("status", STATUS)  # which nobody has heard yet
    async with asyncio.timeout(WITHIN_S):
        await adopted.pool.stop()
    assert adopted.removed == [True] and not adopted.pool.ids


async def test_an_adopted_replica_that_is_one_too_many_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    adopted = Adopted(monkeypatch)
    await adopted.join()
    adopted.pool.retire("decode-0")  # before it has lived for a moment
    async with asyncio.timeout(WITHIN_S):
        await adopted.rank.answer("status", STATUS)
        await adopted.rank.answer("drain", None)
        await adopted.rank.answer("status", STATUS | {"state": "drained"})
        await becomes(lambda: not adopted.pool.ids)
    assert adopted.removed == [True]


async def test_an_update_goes_on_at_once_with_what_served_before_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else, at the end of an update, a controller that comes back has the old revision started once more, and all
    requests sent there, until it takes its own replicas for seen."""
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


class WaitingHeir:
    """A replica that is to have the gang of another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gangs: list[FakeGang] = []
        monkeypatch.setattr(replica_lifecycle, "Gang", self._make)
        self.life = ReplicaLifecycle("prefill-1", make_desired({"timeouts": {"start_s": 1.0}}), was="decode-1")
        self.living = asyncio.create_task(self.life.live())

    def _make(self, replica: str, desired: Desired, failures: Mapping[str, int]) -> FakeGang:
        self.gangs.append(FakeGang())
        return self.gangs[-1]


async def test_an_heir_without_a_gang_starts_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    successor = WaitingHeir(monkeypatch)
    await becomes(lambda: successor.life.view.stage == "waits for decode-1 to drain")
    assert not successor.life.inherit(None)
    with pytest.raises(ReplicaFailed, match="not ready 1 s after it was placed"):
        await successor.living
    assert successor.gangs[0].is_removed


async def test_a_gang_is_left_to_nobody_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    successor, gang = WaitingHeir(monkeypatch), FakeGang()
    await becomes(lambda: successor.life.view.stage)
    successor.living.cancel()
    await asyncio.gather(successor.living, return_exceptions=True)
    assert not successor.life.inherit(gang), "whoever has it removes it"


async def test_a_gang_that_was_taken_is_removed_by_who_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    successor, gang = WaitingHeir(monkeypatch), FakeGang()
    await becomes(lambda: successor.life.view.stage)
    assert successor.life.inherit(gang)
    successor.living.cancel()
    await asyncio.gather(successor.living, return_exceptions=True)
    assert gang.is_removed


async def test_a_gang_that_does_not_come_through_the_change_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was killed just then, or has not let go of all."""
    successor, gang = WaitingHeir(monkeypatch), FakeGang()

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
async def test_half_a_change_is_no_replica(monkeypatch: pytest.MonkeyPatch, ids: list[str], whole: bool) -> None:
    """Where the controller died while its ranks changed their role, one after the other."""
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
        with pytest.raises(ReplicaFailed, match="not whole: its ranks are of decode-0 and of prefill-3"):
            await adoption
        return
    for rank in ranks:
        await rank.answer("bind", {"pid": 1, "host": "node", "address": "127.0.0.1:1", "device": "cpu"})
    await ranks[0].answer("status", STATUS)
    await adoption
    assert (life.view.id, life.view.role, life.gang) == ("prefill-3", Role.PREFILL, "decode-0")
