"""Disaggregated deployment on GPUs: real workers, KV blocks over NCCL, CUDA graphs. One GPU suffices: ranks share it.

Answers are those of one process on a GPU, token for token, whatever dies meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from core.types.failpoint import FailpointStage
from core.types.request import Role, SampledToken, Sampling
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.engine.tiny_models import DEEPSEEK_V2
from tests.support.local_cluster import Answer, LocalCluster, local_cluster
from tests.support.rank_in_process import Fault
from tests.support.waiting import WITHIN_S

pytestmark = pytest.mark.gpu

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=2)
_PROMPTS = prompts(20, 33, 47, 70, 35, 64)
_SAMPLINGS = [_GREEDY] * 3 + [replace(_SAMPLED, seed=seed) for seed in range(3)]


def _tree(prefill: int, decode: int, *, pool_dtype: str = "auto") -> dict[str, Any]:
    pool = {"resources": {"gpus": 0.1}, "kv_memory_gib": 0.01}
    return {
        "model": {"dtype": "float32"},  # less rounding, so that batches of other shapes choose the same tokens
        "kv": {"wire_dtype": "raw", "pool_dtype": pool_dtype},
        "prefill": {"replicas": prefill, "max_batch_tokens": 32 if pool_dtype == "auto" else 512, **pool},
        "decode": {"replicas": decode, "max_running": 8, **pool},
        "router": {"max_local_prefill": 0},
    }


async def _ask(cluster: LocalCluster) -> Sequence[Answer]:
    requests = [
        cluster.generate(prompt, sampling, id=str(number))
        for number, (prompt, sampling) in enumerate(zip(_PROMPTS, _SAMPLINGS, strict=True))
    ]
    async with asyncio.timeout(WITHIN_S):
        return await asyncio.gather(*requests)


def _check(answers: Sequence[Answer], expected: list[list[SampledToken]]) -> None:
    assert [answer.ids for answer in answers] == [[token.token_id for token in tokens] for tokens in expected]


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("qwen3_moe", {}), ("deepseek_v2", DEEPSEEK_V2)], ids=lambda of: str(of)[:11]
)
def test_answers_are_those_of_one_process(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, family: str, changes: dict[str, Any]
) -> None:
    model_dir = checkpoint(family, **changes)

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, **_tree(1, 1)) as cluster:
            answers = await _ask(cluster)
            _check(answers, reference(model_dir, _PROMPTS, _SAMPLINGS, device="cuda"))
            assert all(answer.route.blocks_shipped for answer in answers)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("family", "ranks"), [("llama", (2, 2)), ("llama", (1, 2)), ("qwen3_moe", (2, 2))], ids=lambda of: str(of)
)
def test_answers_with_several_ranks_are_those_of_one_process(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, family: str, ranks: tuple[int, int]
) -> None:
    """CUDA graphs contain all-reduces over ranks, and experts are spread over the ranks."""
    model_dir, tree = checkpoint(family), _tree(1, 1)
    for role, num_ranks in zip(("prefill", "decode"), ranks, strict=True):
        tree[role] |= {"tensor_parallel": num_ranks}
    tree["decode"] |= {"expert_parallel": family == "qwen3_moe"}

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
            _check(await _ask(cluster), reference(model_dir, _PROMPTS, _SAMPLINGS, device="cuda"))

    asyncio.run(play())


@pytest.mark.parametrize("pool_dtype", ["fp8_e4m3", "int8"])
def test_answers_with_8_bit_pools_are_those_of_one_process(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, pool_dtype: str
) -> None:
    """Requests run one at a time, as in the reference: another batch shape may round to another 8-bit code."""
    model_dir = checkpoint("llama")
    engine: dict[str, Any] = {"device": "cuda", "pool_dtype": pool_dtype, "recorded_rows": 8}

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, **_tree(1, 1, pool_dtype=pool_dtype)) as cluster:
            for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True):
                _check([await cluster.generate(prompt, sampling)], reference(model_dir, [prompt], sampling, **engine))

    asyncio.run(play())


@pytest.mark.parametrize(
    ("role", "fault"),
    [(Role.PREFILL, Fault(FailpointStage.COMPUTING, nth=2)), (Role.DECODE, Fault(FailpointStage.COMPUTING, nth=12))],
    ids=["prefill", "decode"],
)
def test_request_resumes_on_another_replica_after_a_kill(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, role: Role, fault: Fault
) -> None:
    model_dir = checkpoint("llama")
    others = {Role.PREFILL: 1, Role.DECODE: 1} | {role: 0}

    async def play() -> None:
        tree = _tree(others[Role.PREFILL], others[Role.DECODE])
        async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster:
            doomed = await cluster.add(role, fault)  # the first of its pool is chosen while all are idle
            await cluster.add(role)
            answers = await _ask(cluster)
            assert doomed.has_been_hit, "the fault never happened"
            _check(answers, reference(model_dir, _PROMPTS, _SAMPLINGS, device="cuda"))

    asyncio.run(play())


def test_answers_migrate_to_another_replica(checkpoint: Checkpoint, reference: Reference, redis_url: str) -> None:
    """A decode replica is drained while it decodes."""
    model_dir = checkpoint("llama")

    async def play() -> None:
        async with local_cluster(model_dir, redis_url, processes=True, **_tree(1, 2)) as cluster:
            answering = asyncio.create_task(_ask(cluster))
            first = cluster.pools[Role.DECODE][0]
            await cluster.until(lambda: cluster.seen(first).status.running)
            await cluster.drain(first)
            _check(await answering, reference(model_dir, _PROMPTS, _SAMPLINGS, device="cuda"))

    asyncio.run(play())
