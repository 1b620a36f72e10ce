"""GPU deployment with role switches under load, and with local decodes on prefill replicas.

The same on a CPU, where it is slow and says that the test is right.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.types.request import Role, Sampling
from router.routing import chooser
from router.routing.plain_policies import RoundRobin
from tests.e2e.conftest import Checkpoint, Reference, exact_tree, on_device
from tests.engine.steps import prompts
from tests.support.local_cluster import Answer, LocalCluster, local_cluster
from tests.support.rank_in_process import shared_ceiling
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
    ),
]

_SAMPLINGS = (Sampling(max_tokens=40, temperature=0.0), Sampling(max_tokens=40, temperature=1.0, top_p=0.9, seed=7))
_PLACES = 2  # slots of a decode replica, and for local decodes of a prefill replica


class Load:
    """Prompts, their reference answers, and their running requests. Every other one is sampled."""

    def __init__(self, model_dir: Path, reference: Reference, device: str, number: int) -> None:
        self._prompts = prompts(*range(33, 33 + number))
        self._samplings = [_SAMPLINGS[i % 2] for i in range(number)]
        reference_tokens = reference(model_dir, self._prompts, self._samplings, device=device)
        self.expected = [[token.token_id for token in tokens] for tokens in reference_tokens]
        self._running: list[asyncio.Task[Answer]] = []

    def ask(self, cluster: LocalCluster, number: int) -> None:
        """Send the next `number` requests."""
        for i in range(len(self._running), len(self._running) + number):
            generation = cluster.generate(self._prompts[i], self._samplings[i], id=str(i))
            self._running.append(asyncio.create_task(generation))

    async def answers(self) -> list[Answer]:
        async with asyncio.timeout(WITHIN_S):
            return await asyncio.gather(*self._running)


def test_streams_continue_while_replicas_switch_roles_both_ways(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, device: str
) -> None:
    model_dir = checkpoint("llama")
    load = Load(model_dir, reference, device, 12)
    running_on, tree = shared_ceiling(20), on_device(device, exact_tree(0, 0))
    tree["decode"] |= {"max_running": 8}

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, policy=RoundRobin(), **tree) as cluster:
            roles = [Role.PREFILL] * 2 + [Role.DECODE] * 2
            prefill, _, decode, _ = await asyncio.gather(*(cluster.add(role, ceiling=running_on) for role in roles))
            load.ask(cluster, 4)
            await cluster.until(lambda: cluster.seen(decode).status.totals.generated_tokens >= 20)
            to_prefill = await cluster.switch(decode)
            assert cluster.replicas.get(decode.id) is None and to_prefill.blocks["cached"]
            load.ask(cluster, 4)
            to_decode = await cluster.switch(prefill)  # while prompts are shipped
            load.ask(cluster, 4)
            running_on.lift()
            answers = await load.answers()
            assert [answer.ids for answer in answers] == load.expected
            assert to_prefill.id in {answer.route.prefill_replica for answer in answers}
            assert to_decode.id in {answer.route.decode_replica for answer in answers}

    asyncio.run(play())


@pytest.mark.parametrize("leaves", [False, True], ids=["they stay", "they move"])
def test_prefill_replica_decodes_locally_when_the_decode_pool_is_full(
    checkpoint: Checkpoint,
    reference: Reference,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    leaves: bool,
    device: str,
) -> None:
    """leaves: the prefill replica becomes a decode replica, and its guests another one's."""
    # While answers stand still, no place comes free.
    monkeypatch.setattr(chooser, "guest_wait_s", lambda *_, **__: 3600.0)
    model_dir = checkpoint("llama")
    load = Load(model_dir, reference, device, 2 * _PLACES)
    running_on, tree = shared_ceiling(20), on_device(device, exact_tree(0, 0))
    tree["prefill"] |= {"max_running": 2 * _PLACES, "answer_share": 0.5, "answer_overflow": True}
    tree["decode"] |= {"max_running": _PLACES}

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
            adding = (cluster.add(role, ceiling=running_on) for role in (Role.PREFILL, Role.DECODE))
            prefill, decode = await asyncio.gather(*adding)
            load.ask(cluster, _PLACES)
            await cluster.until(lambda: cluster.seen(decode).status.running == _PLACES)
            load.ask(cluster, _PLACES)
            await cluster.until(lambda: cluster.seen(prefill).status.local_decodes.running == _PLACES)
            home = prefill
            if leaves:
                home = await cluster.add(Role.DECODE, ceiling=running_on)
                await cluster.switch(prefill)
            running_on.lift()
            answers = await load.answers()
            assert [answer.ids for answer in answers] == load.expected
            assert [answer.route.decode_replica for answer in answers] == [decode.id] * _PLACES + [home.id] * _PLACES

    asyncio.run(play())
