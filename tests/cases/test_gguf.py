"""GGUF files as published: odd token types, names of pre-tokenizers, and i-quants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType

from core.model import config as model_config
from core.model.gguf_import import import_gguf
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from frontend.text.tokenizer import Tokenizer
from tests.engine.gguf_files import VOCABULARY, finish, write_model
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import random_model, reference_logits, tiny_config

_SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


def _imported(directory: Path, **changes: Any) -> Path:
    """Write a GGUF file with the tokens ChatML needs, change its metadata, and import it. None removes a key."""
    tokens = [*VOCABULARY, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    count = len(tokens)
    metadata: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (count - 3) + [3, 3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": count - 3,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama")
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((count, 8), np.float32))
    finish(writer)
    import_gguf(directory / "m.gguf", directory)
    return directory


@pytest.mark.parametrize("kind", [1, 4], ids=["normal", "user-defined"])
def test_mistyped_end_token_ends_the_answer(kind: int, tmp_path: Path) -> None:
    """unslothai/unsloth#6229, LostRuins/koboldcpp#812"""
    count = len(VOCABULARY) + 3
    directory = _imported(tmp_path, token_type=[1] * (count - 3) + [3, 3, kind])
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("ab<|im_end|>")[-1] == count - 1
    assert tokenizer.decode([count - 1]) == "" and count - 1 in tokenizer.eos_token_ids
    assert count - 1 in model_config.load(directory).eos_token_ids


@pytest.mark.parametrize("pre", ["smaug-bpe", None])
def test_pre_tokenizer_of_another_name_or_none(pre: str | None, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#7881"""
    tokenizer = Tokenizer(_imported(tmp_path, pre=pre))
    assert tokenizer.decode(tokenizer.encode("ab!")) == "ab!"


@pytest.mark.parametrize("name", ["IQ4_NL", "IQ4_XS"])
def test_i_quants_are_dequantized(name: str, tmp_path: Path) -> None:
    """EricLBuehler/mistral.rs#2100, kekzl/imp#556"""
    model = random_model(tiny_config("llama", **_SHAPE))
    write_model(tmp_path / "m.gguf", model, quantized=name)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    (tokens,) = prompts(30)
    runner = ModelRunner(EngineConfig(model_dir=tmp_path, dtype="float32", block_size=8, num_blocks=12))
    logits = step(runner, [tokens], [(0, 0, 30)])[0]
    torch.testing.assert_close(logits, reference_logits(model, tokens)[-1], atol=2e-4, rtol=1e-4)
