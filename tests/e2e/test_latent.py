"""Latent attention in a cluster: every rank holds its rows, and each receiving rank gets them once."""

from __future__ import annotations

import asyncio

import pytest

from core.types.request import Sampling
from tests.e2e.conftest import Checkpoint, Reference
from tests.engine.steps import prompts
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3
from tests.support.grids import quick
from tests.support.local_cluster import local_cluster

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


@pytest.mark.parametrize(("p_tp", "d_tp"), quick([(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)], [(2, 1)]))
async def test_greedy_for_pairs_of_tensor_parallel_sizes(
    checkpoint: Checkpoint, reference: Reference, redis_url: str, p_tp: int, d_tp: int
) -> None:
    model_dir, inputs = checkpoint("deepseek_v3", **DEEPSEEK_V3), prompts(5, 16, 33, 70, 31)
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, inputs, _GREEDY)]
    tree = {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"tensor_parallel": p_tp, "kv_memory_gib": 0.01, "max_batch_tokens": 32},
        "decode": {"tensor_parallel": d_tp, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0},
    }
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, _GREEDY, id=str(i)) for i, p in enumerate(inputs)))
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)
        await cluster.idle()


async def test_experts_spread_over_the_decode_ranks(
    checkpoint: Checkpoint, reference: Reference, redis_url: str
) -> None:
    model_dir, inputs = checkpoint("deepseek_v2", **DEEPSEEK_V2), prompts(20, 35)
    expected = [[token.token_id for token in tokens] for tokens in reference(model_dir, inputs, _GREEDY)]
    tree = {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"kv_memory_gib": 0.01},
        "decode": {"tensor_parallel": 2, "expert_parallel": True, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0},
    }
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        assert [(await cluster.generate(p, _GREEDY)).ids for p in inputs] == expected


async def test_8_bits_answer(checkpoint: Checkpoint, redis_url: str) -> None:
    """8-bit wires and pools yield a full-length answer. Their accuracy is measured elsewhere."""
    model_dir, (prompt,) = checkpoint("deepseek_v3", **DEEPSEEK_V3), prompts(40)
    for pool_dtype in ("auto", "fp8_e4m3", "int8"):
        tree = {
            "model": {"dtype": "float32"},
            "kv": {"wire_dtype": "fp8_e4m3", "pool_dtype": pool_dtype},
            "prefill": {"kv_memory_gib": 0.01},
            "decode": {"kv_memory_gib": 0.01},
            "router": {"max_local_prefill": 0},
        }
        async with local_cluster(model_dir, redis_url, **tree) as cluster:
            answer = await cluster.generate(prompt, _GREEDY)
            assert len(answer.ids) == 24 and answer.route.blocks_shipped == 3
