"""GPU deployment in bf16 with quantized weights or an 8-bit wire: answers equal those of one process.

The same on a CPU, where it is slow and says that the test is right.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.types.request import Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.tools.offline import generate
from kvtransfer.protocol.segment import Segment
from kvtransfer.transfer.codec import codec_for, slots_of
from tests.e2e.conftest import Lab, Reference, on_device
from tests.engine.quantized_files import write_quantised
from tests.engine.steps import prompts
from tests.engine.tiny_models import DEEPSEEK_V2, random_model, tiny_config
from tests.support.local_cluster import local_cluster
from tests.support.waiting import WITHIN_S

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize(
        "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
    ),
]

_GREEDY = Sampling(max_tokens=40, temperature=0.0)
_SAMPLED = Sampling(max_tokens=40, temperature=1.0, top_p=0.9, repetition_penalty=1.1)
_PROMPTS = prompts(20, 33, 47, 70)
_SAMPLINGS = [_GREEDY, replace(_SAMPLED, seed=1), _GREEDY, replace(_SAMPLED, seed=2)]
_MAX_RUNNING = 8
_DENSE = {"first_k_dense_replace": 3}  # all layers, because rounding may choose other experts


@pytest.mark.parametrize("stored", ["fp8 blocks", "gptq", "int8 channels", "int8"])
async def test_quantized_weights(lab: Lab, tmp_path: Path, stored: str, device: str) -> None:
    model_dir, weights = lab.checkpoint("llama"), "int8"  # quantized at load
    if stored != "int8":
        write_quantised(tmp_path, random_model(tiny_config("llama")), stored)
        shutil.copy(model_dir / "tokenizer.json", tmp_path)
        model_dir, weights = tmp_path, "auto"
    engine = _engine(device) | {"weights": weights}
    expected = _one_by_one(lab.reference, model_dir, **engine)
    assert await _answers(model_dir, lab.redis_url, _tree(device, weights=weights)) == expected


@pytest.mark.parametrize("pool_dtype", ["fp8_e4m3", "int8"])
async def test_8_bit_pools(lab: Lab, pool_dtype: str, device: str) -> None:
    """Requests run one at a time, as in the reference: another batch shape may round to another 8-bit code."""
    model_dir = lab.checkpoint("llama")
    expected = _one_by_one(lab.reference, model_dir, **_engine(device), pool_dtype=pool_dtype)
    tree = _tree(device)
    tree["kv"] |= {"pool_dtype": pool_dtype}
    assert await _answers(model_dir, lab.redis_url, tree) == expected


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("deepseek_v2", DEEPSEEK_V2 | _DENSE)], ids=["heads", "latents"]
)
async def test_8_bit_wire(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], device: str
) -> None:
    """Answers equal those of one process whose pool passes a prompt's KV through the wire's codec."""
    model_dir = lab.checkpoint(family, **changes)
    runner = ModelRunner(EngineConfig(model_dir=model_dir, kv_memory_gib=0.1, **_engine(device)))
    exact = _generated(runner)
    monkeypatch.setattr(runner, "execute", _with_wire(runner, "fp8_e4m3"))
    expected = _generated(runner)
    assert expected != exact, "the wire changes nothing"
    assert await _answers(model_dir, lab.redis_url, _tree(device, wire_dtype="fp8_e4m3")) == expected


def _engine(device: str) -> dict[str, Any]:
    return {"device": device, "dtype": "bfloat16", "recorded_rows": _MAX_RUNNING}


def _tree(device: str, *, weights: str = "auto", wire_dtype: str = "raw") -> dict[str, Any]:
    """Return the spec. Prompts are computed in one chunk, because bf16 rounding depends on shapes."""
    tree: dict[str, Any] = {
        "model": {"dtype": "bfloat16", "weights": weights},
        "kv": {"wire_dtype": wire_dtype},
        "prefill": {"kv_memory_gib": 0.01, "max_batch_tokens": 512},
        "decode": {"kv_memory_gib": 0.01, "max_running": _MAX_RUNNING},
        "router": {"max_local_prefill": 0},
    }
    return on_device(device, tree)


def _one_by_one(reference: Reference, model_dir: Path, **engine: Any) -> list[list[int]]:
    pairs = zip(_PROMPTS, _SAMPLINGS, strict=True)
    return [reference.ids(model_dir, [prompt], sampling, **engine)[0] for prompt, sampling in pairs]


async def _answers(model_dir: Path, redis_url: str, tree: dict[str, Any]) -> list[list[int]]:
    """Generate answers one at a time, for the same reason."""
    found: list[list[int]] = []
    async with local_cluster(model_dir, redis_url, processes=True, **tree) as cluster, asyncio.timeout(WITHIN_S):
        for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True):
            answer = await cluster.generate(prompt, sampling)
            assert answer.route.blocks_shipped
            found.append(answer.ids)
    return found


def _generated(runner: ModelRunner) -> list[list[int]]:
    return [
        [token.token_id for token in generate(runner, [prompt], sampling)[0]]
        for prompt, sampling in zip(_PROMPTS, _SAMPLINGS, strict=True)
    ]


def _with_wire(runner: ModelRunner, wire_dtype: str) -> Callable[[ScheduledStep | None, Orders], Tensor | None]:
    """Wrap the runner's execute so that each prompt's KV in the pool is what a receiver would get over the wire."""
    codec, execute, pool, layout = codec_for(runner.layout, wire_dtype), runner.execute, runner.pool, runner.layout

    def executed(step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        logits = execute(step, orders)
        for prompt, num_tokens in step.prompts if step else ():
            segment = Segment(first_layer=0, num_layers=layout.num_layers, first_token=0, num_tokens=num_tokens)
            heads = [range(heads.num_heads) for heads in layout.heads]
            slots_T = slots_of(pool, prompt.sequence.blocks, 0, num_tokens)
            payload = torch.empty(codec.num_bytes(segment, heads), dtype=torch.uint8, device=pool.device)
            codec.pack(pool, segment, heads, slots_T, payload)
            codec.unpack(payload, pool, segment, heads, slots_T)
        return logits

    return executed
