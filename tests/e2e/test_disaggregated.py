"""Disaggregated greedy output equals the single-process engine's, token for token, on a raw wire."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cluster.request import Sampling
from engine.load import load_runner
from engine.offline import generate
from engine.parallel import TensorParallel
from tests.engine.tiny_models import TINY, prompts, random_model, tiny_config
from tests.local_cluster import local_cluster

_GREEDY = Sampling(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    random_model(tiny_config("llama")).save_pretrained(directory)
    Tokenizer(WordLevel({f"<{i}>": i for i in range(TINY["vocab_size"])})).save(str(directory / "tokenizer.json"))
    return directory


def _reference(model_dir: Path, asked: list[list[int]], sampling: Sampling = _GREEDY) -> list[list[int]]:
    runner = load_runner(
        model_dir,
        dtype="float32",
        pool_dtype="auto",
        block_size=16,
        kv_memory_gib=0.05,
        parallel=TensorParallel(),
        device=torch.device("cpu"),
        progress=lambda fraction: None,
    )
    return [[token.token_id for token in tokens] for tokens in generate(runner, asked, sampling)]


def _tree(p_tp: int = 1, d_tp: int = 1) -> dict[str, object]:
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"tensor_parallel": p_tp, "kv_memory_gib": 0.01, "max_batch_tokens": 32},
        "decode": {"tensor_parallel": d_tp, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0},
    }


@pytest.mark.parametrize("d_tp", [1, 2])
@pytest.mark.parametrize("p_tp", [1, 2])
async def test_tokens_equal_the_single_process_engines(llama_dir: Path, redis_url: str, p_tp: int, d_tp: int) -> None:
    asked = prompts(5, 16, 33, 70, 47, 31)
    expected = _reference(llama_dir, asked)
    async with local_cluster(llama_dir, redis_url, **_tree(p_tp, d_tp)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, _GREEDY, id=str(i)) for i, p in enumerate(asked)))
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)
        await cluster.idle()
