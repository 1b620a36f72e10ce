"""GGUF files of every architecture beyond dense Llama and Qwen, compared with transformers on the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from core.model.gguf_import import import_gguf
from core.types.errors import SpecError
from tests.engine.gguf_converter import convert
from tests.engine.steps import VOCAB_SIZE, prompts, step
from tests.engine.tiny_models import MakeRunner, random_model, reference_logits

# Inputs of all matrices are multiples of 32, the block of most types.
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = ROPE | {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 4,
}
GROUPS = {"n_group": 4, "topk_group": 2}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9, "intermediate_size": 64}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}

Case = tuple[type[PreTrainedConfig], dict[str, Any]]
CASES: dict[str, Case] = {
    "gemma2": (Gemma2Config, GEMMA | {"attn_logit_softcapping": 3.0}),
    "gemma3": (Gemma3TextConfig, GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": None}),
    "gemma3, scaled": (
        Gemma3TextConfig,
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "sliding_attention": ROPE | {"rope_theta": 500.0},
                "full_attention": ROPE | {"rope_type": "linear", "factor": 4.0},
            },
        },
    ),
    "phi3": (Phi3Config, {"sliding_window": 11}),
    "phi3, partly rotated": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
    "gpt_oss": (GptOssConfig, LOCAL | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt_oss, plain rotation": (GptOssConfig, LOCAL | {"rope_parameters": ROPE}),
    "glm4_moe": (Glm4MoeConfig, ROUTED | GROUPS | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe, plain": (Glm4MoeConfig, ROUTED | {"norm_topk_prob": False}),
    "deepseek_v2": (DeepseekV2Config, ROUTED | LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2, groups": (
        DeepseekV2Config,
        ROUTED | LATENT | GROUPS | {"topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek_v3": (DeepseekV3Config, ROUTED | LATENT | GROUPS | {"rope_parameters": DEEPSEEK_YARN}),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        ROUTED | LATENT | {"mlp_layer_types": ["dense", *["sparse"] * 3], "norm_topk_prob": True},
    ),
}
# Blocks of 256 inputs.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "initializer_range": 0.1}
CASES["qwen3_moe, wide"] = (Qwen3MoeConfig, EXPERTS | WIDE)
QUANTIZED = {
    "qwen3_moe, wide": "Q4_K",
    "gemma2": "Q8_0",
    "gemma3": "Q4_0",
    "phi3": "Q8_0",
    "qwen3_moe": "Q4_0",
    "gpt_oss": "MXFP4",
    "glm4_moe": "F16",
    "deepseek_v3": "Q8_0",
}


def check(
    name: str, make_runner: MakeRunner, directory: Path, *, layer_types: list[str] | None = None, **settings: Any
) -> None:
    """Convert a random model, import the file, and compare the logits after 60 tokens."""
    make, changes = CASES[name]
    changes = changes if layer_types is None else changes | {"layer_types": layer_types}
    model = random_model(make(**(TINY | changes)))
    convert(directory / "m.gguf", model, **settings)
    import_gguf(directory / "m.gguf", directory)
    (tokens,) = prompts(60)
    logits = step(make_runner(directory), [tokens], [(0, 0, 60)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    check(name, make_runner, tmp_path)


@pytest.mark.parametrize("name", QUANTIZED)
def test_logits_equal_the_dequantized_model(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    check(name, make_runner, tmp_path, quantized=QUANTIZED[name])


def test_older_files_keep_the_expansion_of_latents_whole(make_runner: MakeRunner, tmp_path: Path) -> None:
    check("deepseek_v2, groups", make_runner, tmp_path, is_absorbed=False)


def test_layers_that_predict_further_tokens_are_left_out(make_runner: MakeRunner, tmp_path: Path) -> None:
    extra = {f"blk.4.{name}.weight": np.ones((64, 64), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    metadata = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    check("glm4_moe, plain", make_runner, tmp_path, metadata=metadata, extra=extra)


@pytest.mark.parametrize("pattern", [3, [True, True, False] * 2 + [True]], ids=str)
def test_pattern_of_windows(pattern: Any, make_runner: MakeRunner, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    metadata = {"gemma3.attention.sliding_window_pattern": pattern}
    check("gemma3", make_runner, tmp_path, metadata=metadata, layer_types=kinds)


@pytest.mark.parametrize(("num_layers", "expected"), [(2, 24), (46, 16)])
def test_the_widest_gemma_scales_scores_by_its_width(num_layers: int, expected: int, tmp_path: Path) -> None:
    settings = TINY | CASES["gemma2"][1] | {"num_hidden_layers": num_layers, "head_dim": 24}
    convert(tmp_path / "m.gguf", random_model(Gemma2Config(**settings)))
    import_gguf(tmp_path / "m.gguf", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["query_pre_attn_scalar"] == expected


@pytest.mark.parametrize(
    ("name", "metadata", "complaint"),
    [
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2, which is not supported"),
        ("qwen3_moe", {"qwen3moe.expert_shared_count": 1}, "expert_shared_count is 1"),
        ("gpt_oss", {"gpt-oss.rope.freq_base_swa": 7.0}, r"rope.freq_base_swa is 7.0"),
        ("gpt_oss", {"gpt-oss.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor is 2.0"),
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is not sigmoid"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "expert_weights_norm is not supported for softmax"),
        ("deepseek_v2", {"deepseek2.attention.temperature_scale": 0.1}, "temperature_scale is 0.1"),
        ("gemma2", {"gemma2.attention.causal": False}, "causal is False"),
        ("gemma3", {"gemma3.attn_logit_softcapping": 9.0}, "attn_logit_softcapping is 9.0"),
        ("phi3", {"phi3.expert_count": 2}, "expert_count is 2"),
    ],
)
def test_metadata_that_changes_numbers_is_rejected(
    name: str, metadata: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    make, changes = CASES[name]
    convert(tmp_path / "m.gguf", random_model(make(**(TINY | changes))), metadata=metadata)
    with pytest.raises(SpecError, match=complaint) as caught:
        import_gguf(tmp_path / "m.gguf", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe"])
def test_experts_stay_in_their_bits(
    name: str, kind: str, make_runner: MakeRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, changes = CASES[name]
    # All experts are chosen, because rounding may choose others.
    every = {"num_experts_per_tok": changes.get("num_local_experts") or changes.get("num_experts") or 8}
    every |= {"initializer_range": 0.1}  # larger ones amplify rounding
    every |= {} if name != "glm4_moe" else {"n_group": 1, "topk_group": 1}
    convert(tmp_path / "m.gguf", random_model(make(**(TINY | changes | every))), quantized=kind)
    import_gguf(tmp_path / "m.gguf", tmp_path)
    (tokens,) = prompts(30)
    stored, wide = (
        step(make_runner(tmp_path, dtype="bfloat16", weights=weights), [tokens], [(0, 0, 30)])[0].float()
        for weights in ("auto", "widen")
    )
    assert "are held in" not in caplog.text
    assert (stored - wide).norm() < 0.12 * wide.norm()
    assert not torch.equal(stored, wide)
