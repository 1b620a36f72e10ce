"""Local decodes on prefill replicas: same tokens beside prompts, after migrations, and after kills."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from core.types.request import Role, Sampling
from router.routing import chooser
from tests.e2e.conftest import Lab, Reference, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.grids import quick
from tests.support.local_cluster import Answer, LocalCluster, LocalReplica
from tests.support.long_answers import Ceiling
from tests.support.rank_in_process import shared_ceiling

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, seed=7)
_PLACES = 2  # slots of a decode replica, and for local decodes of a prefill replica


def _tree(prefill: int, decode: int, *, tp: int = 1, local_decodes: int = _PLACES) -> dict[str, Any]:
    tree = exact_tree(prefill, decode, tp=(tp, tp))
    tree["prefill"] |= {"max_running": 2 * local_decodes, "answer_share": 0.5, "answer_overflow": True}
    tree["decode"] |= {"max_running": _PLACES}
    return tree


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict that waiting for a decode replica takes an hour. Otherwise the machine's speed would decide whether a
    prefill replica decodes, which it does only if that is faster than waiting."""
    monkeypatch.setattr(chooser, "decode_wait_s", lambda *_, **__: 3600.0)


class Load:
    """Prompts, their reference answers, and their running requests. Every other one is sampled."""

    def __init__(self, cluster: LocalCluster, numbers: range, reference: Reference) -> None:
        self._cluster = cluster
        self._prompts = prompts(*(33 + i for i in numbers))
        self._samplings = [(_GREEDY, _SAMPLED)[i % 2] for i in numbers]
        model_dir, device = Path(cluster.spec.model.source), "cuda" if cluster.spec.decode.resources.gpus else "cpu"
        self.expected = reference.ids(model_dir, self._prompts, self._samplings, device=device)
        self.running: list[asyncio.Task[Answer]] = []

    def ask(self, number: int) -> None:
        """Send the next `number` requests."""
        for i in range(len(self.running), len(self.running) + number):
            generation = self._cluster.generate(self._prompts[i], self._samplings[i], id=str(i))
            self.running.append(asyncio.create_task(generation))

    async def answers(self) -> list[Answer]:
        return [await task for task in self.running]


async def _begun(cluster: LocalCluster, replica: LocalReplica, number: int, *, more: int = 3) -> None:
    """Wait until `number` requests decode on the replica and have a few tokens."""
    seen = cluster.seen(replica)
    before = seen.status.totals.generated_tokens
    await cluster.until(lambda: seen.status.running == number and not seen.status.waiting)
    await cluster.until(lambda: seen.status.totals.generated_tokens >= before + more)


@pytest.mark.parametrize("tp", quick([1, 2], [1]))
async def test_what_a_full_decode_pool_has_no_room_for_is_answered_beside_prompts_and_moves_where_its_replica_leaves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    running_on = Ceiling(20)
    running_on.arm(monkeypatch.setattr)
    async with lab.own(lab.checkpoint("llama"), **_tree(2, 1, tp=tp)) as cluster:
        load = Load(cluster, range(8), lab.reference)
        leaving, staying = cluster.pools[Role.PREFILL]
        [full] = cluster.pools[Role.DECODE]
        load.ask(_PLACES)
        await _begun(cluster, full, _PLACES)
        load.ask(2 * _PLACES)
        hosts = [cluster.seen(prefill) for prefill in (leaving, staying)]
        await cluster.until(lambda: all(host.status.local_decodes.running == _PLACES for host in hosts))
        assert not cluster.core.admission.num_waiting
        empty = await cluster.add(Role.DECODE)
        successor = await cluster.switch(leaving)
        await _begun(cluster, empty, _PLACES, more=0)
        load.ask(2)  # computed on a replica with local decodes, and shipped to the successor
        await _begun(cluster, successor, 2)
        assert hosts[1].status.local_decodes.running == _PLACES
        running_on.lift()
        answers = await load.answers()
        assert [answer.ids for answer in answers] == load.expected
        homes = [answer.route.decode_replica for answer in answers]
        assert sorted(homes) == sorted([full.id, staying.id, empty.id, successor.id] * 2)
        assert {answer.route.attempts for answer in answers} == {1} and answers[-1].route.prefill_replica == staying.id


@pytest.mark.slow
async def test_local_decodes_and_decodes_of_the_last_replica_resume_after_kills(lab: Lab) -> None:
    """A prefill replica with local decodes dies, then the only decode replica; one prefill replica is left."""
    running_on = shared_ceiling(20)
    tree = _tree(0, 0, local_decodes=2 * _PLACES)
    async with lab.own(lab.checkpoint("llama"), processes=True, **tree) as cluster:
        load = Load(cluster, range(2 * _PLACES), lab.reference)
        starting = [cluster.add(role, ceiling=running_on) for role in (Role.PREFILL, Role.DECODE)]
        doomed, decode = await asyncio.gather(*starting)
        load.ask(_PLACES)
        await _begun(cluster, decode, _PLACES)
        load.ask(_PLACES)
        await _begun(cluster, doomed, _PLACES)
        left = await cluster.add(Role.PREFILL, ceiling=running_on)
        for dying, number in ((doomed, _PLACES), (decode, 2 * _PLACES)):
            dying.send(signal.SIGKILL)
            await _begun(cluster, left, number, more=0)  # they may be paused at the ceiling
        running_on.lift()
        answers = await load.answers()
        assert [answer.ids for answer in answers] == load.expected
        assert {answer.route.migrations for answer in answers} == {1}
        assert {answer.route.decode_replica for answer in answers} == {left.id}


@pytest.mark.gpu
@pytest.mark.parametrize("leaves", [False, True], ids=["they stay", "they move"])
async def test_local_decodes_on_a_gpu(lab: Lab, leaves: bool) -> None:
    """leaves: the prefill replica becomes a decode replica, and its answers move to another one."""
    running_on, tree = shared_ceiling(20), on_device("cuda", _tree(0, 0))
    async with lab.own(lab.checkpoint("llama"), processes=True, **tree) as cluster:
        load = Load(cluster, range(2 * _PLACES), lab.reference)
        adding = (cluster.add(role, ceiling=running_on) for role in (Role.PREFILL, Role.DECODE))
        home, decode = await asyncio.gather(*adding)
        load.ask(_PLACES)
        await cluster.until(lambda: cluster.seen(decode).status.running == _PLACES)
        load.ask(_PLACES)
        await cluster.until(lambda: cluster.seen(home).status.local_decodes.running == _PLACES)
        if leaves:
            leaving, home = home, await cluster.add(Role.DECODE, ceiling=running_on)
            await cluster.switch(leaving)
        running_on.lift()
        answers = await load.answers()
        assert [answer.ids for answer in answers] == load.expected
        assert [answer.route.decode_replica for answer in answers] == [decode.id] * _PLACES + [home.id] * _PLACES
