"""A client that goes away frees everything, at whatever moment it goes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cluster.request import Sampling, SequenceRequest
from tests.e2e.conftest import Checkpoint
from tests.engine.steps import prompts
from tests.local_cluster import LocalCluster, local_cluster


def _tree(*, tp: int) -> dict[str, Any]:
    return {
        "model": {"dtype": "float32"},
        "prefill": {"kv_memory_gib": 0.01, "max_batch_tokens": 32, "tensor_parallel": tp},
        "decode": {"kv_memory_gib": 0.01, "tensor_parallel": tp},
        "router": {"max_local_prefill": 16},
    }


async def _ask(cluster: LocalCluster, number: int, prompt: list[int]) -> None:
    sampling = Sampling(max_tokens=200, temperature=1.0, seed=number)
    request = SequenceRequest(
        id=str(number),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        choices=(0, 1) if number % 5 == 0 else (0,),
    )
    async with cluster.dispatch.start(request) as generation:
        async for _ in generation:
            pass


@pytest.mark.parametrize("tp", [1, 2])
async def test_200_requests_cancelled_at_random_moments_leave_nothing_behind(
    checkpoint: Checkpoint, redis_url: str, tp: int
) -> None:
    moments = random.Random(tp)
    asked = prompts(*[moments.randint(1, 60) for _ in range(200)])
    async with local_cluster(checkpoint("llama"), redis_url, **_tree(tp=tp)) as cluster:

        async def ask_and_go_away(number: int) -> None:
            task = asyncio.create_task(_ask(cluster, number, asked[number]))
            await asyncio.wait({task}, timeout=moments.expovariate(10))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 200, 25):
            await asyncio.gather(*(ask_and_go_away(number) for number in range(start, start + 25)))
        await cluster.idle(timeout_s=2.0)
        cancelled = sum(replica.status.totals.cancelled for replica in cluster.replicas)
        assert cancelled > 50, "too few requests were cancelled while they ran"
