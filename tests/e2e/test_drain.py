"""A draining replica takes no new requests and finishes all that it has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from core.types.request import Role, Sampling
from router.routing.plain_policies import RoundRobin
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.local_cluster import LocalCluster, LocalReplica, local_cluster

_TREE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "prefill": {"replicas": 2, "kv_memory_gib": 0.01, "answer_share": 0},
    "decode": {"replicas": 2, "kv_memory_gib": 0.01},
    "router": {"max_local_prefill": 0},
}
_GREEDY = Sampling(max_tokens=60, temperature=0.0)


async def _leave(cluster: LocalCluster, replica: LocalReplica) -> None:
    await cluster.drain(replica)
    await asyncio.to_thread(replica.ranks[0].stop)


async def test_one_replica_of_each_pool_leaves_under_load(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(*range(20, 52))
    running_on = Ceiling(30)
    running_on.arm(monkeypatch.setattr)
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, inputs, _GREEDY)]
    async with local_cluster(model_dir, redis_url, policy=RoundRobin(), **_TREE) as cluster:
        leaving = [cluster.pools[role].pop() for role in Role]
        running = [
            asyncio.create_task(cluster.generate(prompt, _GREEDY, id=str(i))) for i, prompt in enumerate(inputs[:16])
        ]
        seen = [cluster.seen(replica) for replica in leaving]
        await cluster.until(lambda: seen[1].status.totals.generated_tokens >= 30)
        draining = asyncio.gather(*(_leave(cluster, replica) for replica in leaving))
        await cluster.until(lambda: not any(replica.is_usable for replica in seen))
        running_on.lift()
        late = await asyncio.gather(
            *(cluster.generate(prompt, _GREEDY, id=str(i)) for i, prompt in enumerate(inputs[16:], start=16))
        )
        await draining
        answers = [await task for task in running] + late
        assert [answer.ids for answer in answers] == expected
        assert {replica.id for replica in leaving}.isdisjoint(
            {name for answer in late for name in (answer.route.prefill_replica, answer.route.decode_replica)}
        )


async def test_a_replica_that_joins_is_used(checkpoint: Checkpoint, redis_url: str) -> None:
    async with local_cluster(checkpoint("llama"), redis_url, **_TREE | {"decode": {"replicas": 0}}) as cluster:
        waiting = asyncio.create_task(cluster.generate(prompts(30)[0], _GREEDY))
        newcomer = await cluster.add(Role.DECODE)
        assert (await waiting).route.decode_replica == newcomer.id
