"""Fixtures: random checkpoints for whole clusters, and reference answers of a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from core.types.request import SampledToken, Sampling
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import random_model, tiny_config

Checkpoint = Callable[..., Path]
Reference = Callable[..., list[list[SampledToken]]]


def exact_tree(prefill: int, decode: int, **router: Any) -> dict[str, Any]:
    """Return the spec of a deployment that reproduces the reference token for token.

    Every prompt is computed on a prefill replica, in several steps.
    """
    return {
        "model": {"dtype": "float32"},
        "kv": {"wire_dtype": "raw"},
        "prefill": {"replicas": prefill, "kv_memory_gib": 0.01, "max_batch_tokens": 32, "answer_share": 0},
        "decode": {"replicas": decode, "kv_memory_gib": 0.01},
        "router": {"max_local_prefill": 0} | router,
    }


def on_device(device: str, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the spec for `device`. On a GPU all ranks share it."""
    if device == "cuda":
        for role in ("prefill", "decode"):
            tree[role] |= {"resources": {"gpus": 0.1}}
    return tree


def gib_of_blocks(number: int) -> float:
    """Return the size in GiB of a pool for exactly `number` blocks of the tiny Llama in float32."""
    bytes_per_block = 3 * 2 * 2 * 16 * 4 * 16  # layers, k and v, kv heads, head_dim, float32, block
    return (number + 0.5) * bytes_per_block / 2**30


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint("llama", num_key_value_heads=1) -> a model directory with random weights and a tokenizer."""
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in made:
            made[key] = directory = tmp_path_factory.mktemp(family)
            random_model(tiny_config(family, **changes)).save_pretrained(directory)
            tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB_SIZE)}))
            tokenizer.decoder = ByteLevel()
            tokenizer.save(str(directory / "tokenizer.json"))
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference() -> Reference:
    """reference(model_dir, prompts, samplings, dtype="float32", …) -> what the single-process engine generates."""
    runners: dict[EngineConfig, ModelRunner] = {}

    def run(
        model_dir: Path,
        prompts: list[list[int]],
        samplings: Sampling | list[Sampling],
        *,
        dtype: str = "float32",
        **engine: Any,
    ) -> list[list[SampledToken]]:
        config = EngineConfig(model_dir=model_dir, dtype=dtype, kv_memory_gib=0.1, **engine)
        if config not in runners:
            runners[config] = ModelRunner(config)
        return generate(runners[config], prompts, samplings)

    return run
