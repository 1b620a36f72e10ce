"""Network partition between two hosts that are both alive."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.types.request import Role, Sampling
from router.routing.policy import Option
from tests.e2e.conftest import Checkpoint, Reference
from tests.e2e.test_pull import FakePolicy
from tests.engine.steps import prompts
from tests.support import hosts
from tests.support.grids import quick
from tests.support.hosts import Cable
from tests.support.local_cluster import Answer, LocalCluster, local_cluster
from tests.support.rank_in_process import shared_ceiling
from tests.support.redis_at import redis_at
from tests.support.waiting import WITHIN_S, becomes

pytestmark = pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, to make network namespaces")

_PROMPTS = prompts(20, 33, 47, 70)
_GREEDY = Sampling(max_tokens=400, temperature=0.0)
_TREE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "prefill": {"replicas": 0, "kv_memory_gib": 0.02},
    "decode": {"replicas": 0, "kv_memory_gib": 0.02},
    "router": {"max_local_prefill": 0},
}


@pytest.fixture
def cable() -> Iterator[Cable]:
    with hosts.cable() as made:
        yield made


@pytest.fixture
def near_redis(cable: Cable, tmp_path: Path) -> Iterator[str]:
    """Run Redis on the near side, so that the far side is cut off from it, too."""
    with redis_at(cable.near.address, tmp_path) as url:
        yield url


@pytest.mark.parametrize("role", quick(Role, [Role.DECODE]))
async def test_streams_continue_and_the_far_side_returns_empty(
    role: Role, cable: Cable, near_redis: str, checkpoint: Checkpoint, reference: Reference
) -> None:
    model_dir = checkpoint("llama")
    expected = reference(model_dir, _PROMPTS, _GREEDY)
    running_on, policy = shared_ceiling(100), FakePolicy()
    async with local_cluster(model_dir, near_redis, processes=True, policy=policy, **_TREE) as cluster:
        adding = [cluster.add(each, ceiling=running_on, on=cable.near) for each in Role]
        far, *near = await asyncio.gather(cluster.add(role, ceiling=running_on, on=cable.far), *adding)
        ids = dict(zip(Role, (replica.id for replica in near), strict=True))
        here, there = (
            Option(prefill=each[Role.PREFILL], decode=each[Role.DECODE]) for each in (ids, ids | {role: far.id})
        )
        # Requests that go on elsewhere are longer.
        policy.ways = defaultdict(lambda: [here], {len(prompt): [there, here] for prompt in _PROMPTS[:2]})
        requests = [asyncio.create_task(_ask(cluster, prompt)) for prompt in _PROMPTS]
        await becomes(lambda: far.ranks[0].status()["running"])
        cable.cut()
        running_on.lift()
        async with asyncio.timeout(WITHIN_S):
            answers = await asyncio.gather(*requests)
        assert [answer.ids for answer in answers] == [[token.token_id for token in tokens] for tokens in expected]
        # After three seconds of silence it is dropped, whether it was in use or not.
        await cluster.until(lambda: not (seen := cluster.replicas.get(far.id)) or not seen.is_usable)
        cable.mend()
        await cluster.until(lambda: (again := cluster.replicas.get(far.id)) and again.is_usable)
        await cluster.idle()
        assert (await _ask(cluster, _PROMPTS[0])).ids == answers[0].ids
        await cluster.idle()


async def _ask(cluster: LocalCluster, prompt: list[int]) -> Answer:
    return await cluster.generate(prompt, _GREEDY, id=str(len(prompt)))
