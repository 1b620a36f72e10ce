"""Slow, lossy network between two hosts: requests are slow, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.types.request import Role, Sampling
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.support import hosts
from tests.support.hosts import Cable
from tests.support.local_cluster import local_cluster
from tests.support.redis_at import redis_at
from tests.support.slow_cable import Slowness
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, to make network namespaces"),
]

_SLOW = Slowness(delay_s=0.02, loss=0.01, bytes_per_s=100e6 / 8)
_WIDE = {"head_dim": 256, "num_key_value_heads": 4, "num_hidden_layers": 6}  # 48 KiB a token, as real models have
_PROMPTS = prompts(*range(64, 72))
_GREEDY = Sampling(temperature=0.0, max_tokens=40)
_TREE = {
    "model": {"dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "prefill": {"replicas": 0, "kv_memory_gib": 0.1},
    "decode": {"replicas": 0, "kv_memory_gib": 0.1},
    "router": {"max_local_prefill": 0},
}


@pytest.fixture
def cable() -> Iterator[Cable]:
    with hosts.cable(_SLOW) as made:
        yield made


async def test_answers_are_the_same_and_the_policy_learns_which_way_is_slow(
    cable: Cable, checkpoint: Checkpoint, reference: Reference, tmp_path: Path
) -> None:
    model_dir = checkpoint("llama", **_WIDE)
    expected = reference(model_dir, _PROMPTS, _GREEDY)
    with redis_at(cable.near.address, tmp_path) as url:
        async with local_cluster(model_dir, url, processes=True, **_TREE) as cluster:
            far, near, _ = await asyncio.gather(
                cluster.add(Role.PREFILL, on=cable.far),
                cluster.add(Role.PREFILL, on=cable.near),
                cluster.add(Role.DECODE, on=cable.near),
            )
            async with asyncio.timeout(WITHIN_S):
                requests = (cluster.generate(p, _GREEDY, id=str(len(p))) for p in _PROMPTS)
                answers = await asyncio.gather(*requests)
            assert [answer.ids for answer in answers] == [[token.token_id for token in tokens] for tokens in expected]
            assert {answer.route.attempts for answer in answers} == {1}, "slow is not lost"
            await cluster.until(lambda: all(cluster.seen(p).load().link_bytes_per_s for p in (far, near)))
            slow, quick = (cluster.seen(replica).load().link_bytes_per_s for replica in (far, near))
            assert slow < quick / 2
            print(f"learnt: {slow / 1e6:.1f} and {quick / 1e6:.1f} MB/s")
            await cluster.idle()
