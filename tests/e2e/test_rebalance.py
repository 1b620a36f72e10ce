"""Rebalancing: running requests move from a crowded decode replica to an empty one, with unchanged tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from core.types.request import Role, Sampling
from router.routing.plain_policies import RoundRobin
from router.routing.policy import CandidateReplica, Option, RoutingRequest
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.support.ceiling import Ceiling
from tests.support.grids import quick
from tests.support.local_cluster import beside, local_cluster

_TREE: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "kv": {"wire_dtype": "raw"},
    "prefill": {"replicas": 1, "kv_memory_gib": 0.01},
    "decode": {"replicas": 2, "kv_memory_gib": 0.05},
    "router": {"max_local_prefill": 0},
}
_CROWDED = "decode-1"
_GREEDY = Sampling(max_tokens=200, temperature=0.0)
_SAMPLED = Sampling(max_tokens=200, temperature=1.0, seed=7)


class Crowding:
    """Policy that sends everything to one decode replica."""

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        candidates = [view for view in decodes if view.replica == _CROWDED] or decodes
        return RoundRobin().options(demand, prefills, candidates)


@pytest.fixture
def running_on(monkeypatch: pytest.MonkeyPatch) -> Ceiling:
    ceiling = Ceiling(20)
    ceiling.arm(monkeypatch.setattr)
    return ceiling


@pytest.mark.parametrize("sampling", quick([_GREEDY, _SAMPLED], [_SAMPLED]), ids=["greedy", "sampled"])
async def test_crowded_requests_spread_with_unchanged_tokens(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, running_on: Ceiling, sampling: Sampling
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(*range(20, 28))
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, inputs, sampling)]
    async with local_cluster(model_dir, redis_url, policy=Crowding(), **_TREE) as cluster:
        async with beside(cluster.core.rebalance_forever()):
            running = [
                asyncio.create_task(cluster.generate(prompt, sampling, id=str(i))) for i, prompt in enumerate(inputs)
            ]
            emptier = cluster.seen(cluster.pools[Role.DECODE][1])
            await cluster.until(lambda: emptier.status.running >= 2)
            running_on.lift()
            answers = [await task for task in running]
        assert [answer.ids for answer in answers] == expected
        assert sum(cluster.seen(decode).status.totals.migrations for decode in cluster.pools[Role.DECODE]) >= 2
        assert {answer.route.decode_replica for answer in answers} == {"decode-1", "decode-2"}
        await cluster.idle()
        decodes = [replica for replica in cluster.replicas if replica.member.role is Role.DECODE]
        assert [(replica.promised_blocks, replica.promised_streams) for replica in decodes] == [(0, 0), (0, 0)]


async def test_migrated_request_migrates_again_when_its_replica_drains(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, running_on: Ceiling
) -> None:
    model_dir, inputs = checkpoint("llama"), prompts(*range(20, 28))
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, inputs, _GREEDY)]
    async with local_cluster(model_dir, redis_url, policy=Crowding(), **_TREE) as cluster:
        async with beside(cluster.core.rebalance_forever()):
            running = [
                asyncio.create_task(cluster.generate(prompt, _GREEDY, id=str(i))) for i, prompt in enumerate(inputs)
            ]
            newcomer = next(replica for replica in cluster.pools[Role.DECODE] if replica.id != _CROWDED)
            await cluster.until(lambda: cluster.seen(newcomer).status.running)  # the first choice has moved
            await cluster.drain(newcomer)
            running_on.lift()
            answers = [await task for task in running]
        assert [answer.ids for answer in answers] == expected
        assert {answer.route.decode_replica for answer in answers} == {_CROWDED}
        assert [answer.route.migrations for answer in answers] == [0] * len(answers), "it was computed again"
