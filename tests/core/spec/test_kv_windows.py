"""Which deployments free the KV that attention windows no longer reach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.model import config as model_config
from core.model.recurrent import ShortConvShape
from core.spec.kv_windows import why_windows_stay
from core.spec.loader import parse_spec

_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 32768,
    "sliding_window": 1024,
}


_GEMMA = {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
}


@pytest.mark.parametrize(
    ("spec", "config", "why"),
    [
        ({}, {}, None),
        ({"speculation": {"method": "ngram"}}, {}, None),
        ({}, {"sliding_window": None}, "no layer has an attention window"),
        ({"model": {"max_context": 1024}}, {}, "contexts of 1024 tokens are not longer than the window of 1024"),
        ({}, {"sliding_window": 8192}, "the window of 8192 tokens is large, and model.max_context is not set"),
        ({"model": {"max_context": 32768}}, {"sliding_window": 8192}, None),
        (
            {"prefill": {"kv_host_gib": 1}},
            {},
            "lower tiers keep a block by its layers without a window, and every layer has one",
        ),
        ({"prefill": {"kv_host_gib": 1}}, _GEMMA, None),
        ({"speculation": {"method": "self"}}, {}, None),
    ],
)
def test_windows_stay_for_a_reason(
    spec: dict[str, Any], config: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MISTRAL | config))
    assert why_windows_stay(parse_spec(spec), model_config.load(tmp_path)) == why


def test_windows_stay_beside_recurrent_layers(tmp_path: Path) -> None:
    """No supported family has both."""
    (tmp_path / "config.json").write_text(json.dumps(_MISTRAL))
    state = ShortConvShape(hidden_size=64, conv_width=3, has_bias=False)
    model = model_config.load(tmp_path)
    first, second = model.layers
    mixed = replace(model, layers=(replace(first, recurrent=state, window=None), second))
    why = "states of recurrent layers and parts of blocks are not kept together"
    assert why_windows_stay(parse_spec({}), mixed) == why
