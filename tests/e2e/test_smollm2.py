"""Disaggregated SmolLM2 (9 query and 3 KV heads) against the single-process engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.model.config import load
from core.types.errors import SpecError
from core.types.request import Sampling
from frontend.chat.chat_template import ChatTemplate
from frontend.chat.template_files import find_chat_template
from frontend.text.tokenizer import Tokenizer
from tests.e2e.conftest import Reference
from tests.support.grids import quick
from tests.support.local_cluster import local_cluster

_GREEDY = Sampling(max_tokens=12, temperature=0.0)


def _prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer(model_dir)
    template = ChatTemplate(find_chat_template(model_dir), special_tokens=tokenizer.special_tokens)
    questions = ("What is the capital of France?", "Name three colours of the rainbow.")
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _tree(dtype: str, *, p_tp: int = 1, d_tp: int = 1) -> dict[str, Any]:
    return {
        "model": {"dtype": dtype},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"tensor_parallel": p_tp, "kv_memory_gib": 0.1},
        "decode": {"tensor_parallel": d_tp, "kv_memory_gib": 0.1},
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("p_tp", "d_tp"), quick([(1, 1), (1, 3), (3, 1), (3, 3)], [(1, 1)]))
async def test_float32_tokens_for_any_pair_of_tensor_parallel_sizes(
    smollm2_dir: Path, reference: Reference, redis_url: str, p_tp: int, d_tp: int
) -> None:
    inputs = _prompts(smollm2_dir)
    expected = [[token.token_id for token in tokens] for tokens in reference(smollm2_dir, inputs, _GREEDY)]
    async with local_cluster(smollm2_dir, redis_url, **_tree("float32", p_tp=p_tp, d_tp=d_tp)) as cluster:
        answers = await asyncio.gather(*(cluster.generate(p, _GREEDY, id=str(i)) for i, p in enumerate(inputs)))
        assert [answer.ids for answer in answers] == expected
        assert all(answer.route.blocks_shipped for answer in answers)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_bfloat16_tokens_one_request_at_a_time(smollm2_dir: Path, reference: Reference, redis_url: str) -> None:
    inputs = _prompts(smollm2_dir)
    expected = [
        [token.token_id for token in reference(smollm2_dir, [prompt], _GREEDY, dtype="bfloat16")[0]]
        for prompt in inputs
    ]
    async with local_cluster(smollm2_dir, redis_url, **_tree("bfloat16")) as cluster:
        assert [(await cluster.generate(prompt, _GREEDY)).ids for prompt in inputs] == expected


def test_a_tensor_parallel_size_that_does_not_fit_is_refused_naming_those_that_do(smollm2_dir: Path) -> None:
    with pytest.raises(SpecError, match=r"1, 3,? (and|or) 9|1, 3, 9"):
        load(smollm2_dir).check_tensor_parallel(2)
