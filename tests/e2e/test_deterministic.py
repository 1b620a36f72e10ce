"""`engine.deterministic`: a request's tokens do not depend on its batch, chunking, or replica."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from core.types.request import Role, Sampling, TokenRules
from engine.config import EngineConfig
from engine.cpu.library import open_kernels
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from tests.e2e.conftest import Lab
from tests.engine.steps import prompts
from tests.support.local_cluster import Answer, LocalCluster
from tests.support.long_answers import Ceiling

CPU = torch.device("cpu")
NUM_REQUESTS, NUM_TOKENS = 64, 40
LENGTHS = [3 + 7 * i for i in range(NUM_REQUESTS - 4)] + [530, 577, 608, 700]  # the last ones exceed a chunk of 512
PROMPTS = prompts(*LENGTHS)
RULES = TokenRules(logit_bias=((5, 2.0),), bad_words=((5, 5), (7,)))
SAMPLINGS = [
    Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
    if i % 2
    else Sampling(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=i, token_rules=RULES if i % 4 else None)
    for i in range(NUM_REQUESTS)
]
WIDE = {"max_position_embeddings": 1024}
TREES: dict[str, dict[str, Any]] = {
    "raw": {"wire_dtype": "raw"},
    "fp8 pool": {"pool_dtype": "fp8_e4m3"},
    "int8 pool": {"pool_dtype": "int8"},
    "int4 pool": {"pool_dtype": "int4", "unquantized_layers": [0]},
}


pytestmark = pytest.mark.skipif(open_kernels(dtype=torch.bfloat16, device=CPU) is None, reason="no C++ compiler here")


@pytest.mark.parametrize(
    "pool", ["raw", *(pytest.param(pool, marks=pytest.mark.slow) for pool in TREES if pool != "raw")]
)
async def test_64_requests_alone_batched_chunked_and_migrated(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    model_dir, kv = lab.checkpoint("llama", **WIDE), TREES[pool]
    runner = _runner(model_dir, kv.get("pool_dtype", "auto"), tuple(kv.get("unquantized_layers", ())))
    alone = [_generate(runner, [p], [s], 1024)[0] for p, s in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert len({tuple(ids) for ids in alone}) == NUM_REQUESTS
    for max_batch_tokens in (4096, 64):
        assert _generate(runner, PROMPTS, SAMPLINGS, max_batch_tokens) == alone
    tree = {
        "model": {"dtype": "bfloat16"},
        "kv": kv,
        "engine": {"deterministic": True},
        "prefill": {"kv_memory_gib": 0.02, "max_batch_tokens": 64},
        "decode": {"kv_memory_gib": 0.02},
    }
    running_on = Ceiling(NUM_TOKENS // 4)
    running_on.arm(monkeypatch.setattr)
    async with lab.own(model_dir, **tree) as cluster:
        answers = await _asked_while_a_replica_leaves(cluster, running_on)
    assert [answer.ids for answer in answers] == alone
    assert {bool(answer.route.prefill_replica) for answer in answers} == {True, False}  # short ones stay on decode


async def _asked_while_a_replica_leaves(cluster: LocalCluster, running_on: Ceiling) -> list[Answer]:
    leaving = cluster.pools[Role.DECODE][0]
    requests = [
        asyncio.create_task(cluster.generate(prompt, sampling, id=str(i)))
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    await cluster.until(lambda: cluster.seen(leaving).status.totals.generated_tokens >= 10 * NUM_TOKENS // 4)
    await cluster.add(Role.DECODE)
    draining = asyncio.create_task(cluster.drain(leaving))
    await cluster.until(lambda: cluster.seen(leaving).status.totals.migrations >= 8)
    running_on.lift()
    await draining
    return list(await asyncio.gather(*requests))


def _runner(model_dir: Path, pool_dtype: str, unquantized_layers: tuple[int, ...]) -> ModelRunner:
    torch.set_num_threads(1)
    config = EngineConfig(
        model_dir=model_dir,
        pool_dtype=pool_dtype,
        unquantized_layers=unquantized_layers,
        kv_memory_gib=0.05,
        deterministic=True,
    )
    return ModelRunner(config)


def _generate(
    runner: ModelRunner, requests: list[list[int]], samplings: list[Sampling], max_batch_tokens: int
) -> list[list[int]]:
    answers = generate(runner, requests, samplings, max_batch_tokens=max_batch_tokens)
    return [[token.token_id for token in answer] for answer in answers]
