"""Settings of single model families: values that cannot be computed are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.model.config import parse
from core.types.errors import SpecError

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2}
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_KINDS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
_GEMMA4 = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
_GEMMA4 |= {"layer_types": _KINDS}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "MixtralForCausalLM": _LOCAL,
    "Qwen3MoeForCausalLM": _QWEN,
    "DeepseekV2ForCausalLM": _ROUTED | _LATENT | {"topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": _ROUTED | _LATENT,
    "DeepseekV32ForCausalLM": _ROUTED | _LATENT,
    "GlmMoeDsaForCausalLM": _ROUTED | _LATENT,
    "Glm4MoeForCausalLM": _ROUTED,
    "Mistral4ForCausalLM": _ROUTED | _LATENT | {"n_group": 1, "topk_group": 1},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma4ForCausalLM": _GEMMA4,
    "Phi3ForCausalLM": {},
    "GptOssForCausalLM": _LOCAL,
    "MiniMaxM2ForCausalLM": _LOCAL,
    "Llama4ForCausalLM": {"num_local_experts": 6},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*E", "n_routed_experts": 8},
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("architecture", _FAMILIES)
def test_a_family_reads_these_settings(architecture: str) -> None:
    parse({"architectures": [architecture], **_SIZES, **_FAMILIES[architecture]}, Path("config.json"))


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("Mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, and must be a whole number from 1 to 6"),
        ("Gemma4", {"top_k_experts": 7}, "top_k_experts is 7, and must be a whole number from 1 to 6"),
        ("Qwen3Moe", {"num_experts": 1 << 30}, "num_experts is 1073741824, and must be a whole number from 1 to 4096"),
        ("Qwen3Moe", {"num_experts": 4096, "num_hidden_layers": 4096}, "4096 layers of 4096 experts exceed 262144"),
        ("DeepseekV3", {"n_group": 3}, "n_group 3 and topk_group 2 do not fit 8 n_routed_experts"),
        ("DeepseekV3", {"n_group": 8}, "groups need one size, at least 2 experts each"),
        ("DeepseekV3", {"topk_group": 1}, "do not fit 8 n_routed_experts and 3 num_experts_per_tok"),
        ("DeepseekV2", {"topk_group": 5}, "topk_group is 5, and must be a whole number from 1 to 4"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("DeepseekV32", {"index_head_dim": 7}, "index_head_dim is 7, and must be a whole number from 8"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk is 0, and must be a whole number from 1"),
        ("DeepseekV32", {"index_topk_freq": 4}, "index_topk_freq 4 is not supported for DeepseekV32ForCausalLM"),
        ("DeepseekV3", {"index_topk": 2048}, "index_topk 2048 is not supported for DeepseekV3ForCausalLM"),
        ("GlmMoeDsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave false is not supported"),
        ("GlmMoeDsa", {"index_topk_pattern": "FXFF"}, "index_topk_pattern X of layer 1 is not supported"),
        ("GlmMoeDsa", {"indexer_types": ["full"]}, "indexer_types must be a list of 4 values"),
        ("GlmMoeDsa", {"index_topk_pattern": "SFFF"}, "layer 0 shares the positions of an earlier layer"),
        # transformers ranks its groups as those of sigmoid scores.
        ("Mistral4", {"n_group": 2}, "n_group 2 is not supported for Mistral 4"),
        ("Glm4Moe", {"mlp_layer_types": ["dense", "Sparse"] * 2}, "mlp_layer_types Sparse of layer 1 is not supported"),
        ("Glm4Moe", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 of head_dim 16 rotates 0 features"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; supported: sigmoid"),
        ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; supported: sigmoid"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "rotates 7 features"),
        ("DeepseekV3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is ['1'], and must be a list of layers"),
        ("Llama4", {"moe_layers": [-1]}, "moe_layers is [-1], and must be a list of layers"),
        ("Llama4", {"no_rope_layers": ["a"] * 4}, "no_rope_layers a of layer 0 is not supported; supported: 1, 0"),
        ("Llama4", {"layer_types": _KINDS}, "layer_types sliding_attention of layer 0 is not supported"),
        ("Gemma3", {"layer_types": ["full"] * 4}, "layer_types full of layer 0 is not supported"),
        ("Gemma2", {"layer_types": [[1]] * 4}, "layer_types [1] of layer 0 is not supported"),
        ("Gemma2", {"sliding_window": 0}, "sliding_window is 0, and must be a whole number from 1"),
        ("Qwen2", {"max_window_layers": "x"}, "max_window_layers is 'x', and must be a whole number"),
        ("Gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3, and must be a JSON object"),
        ("Gemma4", {"rope_parameters": {"full_attention": [1]}}, "full_attention is [1], and must be a JSON object"),
        ("Gemma4", {"per_layer_config": []}, "per_layer_config is [], and must be a JSON object"),
        ("Gemma4", {"per_layer_config": {"²": {}}}, "per_layer_config: layer '²' is not one of the 4 layers"),
        ("Gemma4", {"per_layer_config": {"2": {"head_dim": 32}}}, "head_dim [16, 32] of full_attention layers"),
        ("Gemma4", {"per_layer_config": {"3": {"num_key_value_heads": 4}}, "num_kv_shared_layers": 1},
         "layer 3 shares keys and values with layer 2, which has other heads"),
        ("Gemma4", {"num_global_key_value_heads": "3", "attention_k_eq_v": True},
         "num_global_key_value_heads is '3', and must be a whole number"),
        ("Gemma4", {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
         "must be a multiple of the 3 num_key_value_heads of layer 2"),
        ("Phi3", {"rope_scaling": _LONGROPE | {"original_max_position_embeddings": 1}},
         "rope type longrope has original_max_position_embeddings 1.0, and must have at least 2"),
        ("NemotronH", {"hybrid_override_pattern": "M-*e"}, "hybrid_override_pattern 'M-*e'; one must give the kind"),
        ("NemotronH", {"hybrid_override_pattern": "M-E"}, "no layer has attention; at least one must have it"),
        ("NemotronH", {"layers_block_type": ["mlp", "rwkv"]}, "layers_block_type rwkv of layer 1 is not supported"),
        ("NemotronH", {"time_step_limit": [0.1, 0.0]}, "time_step_limit is [0.1, 0.0], and must be two numbers from 0"),
        ("NemotronH", {"time_step_limit": [0.1, "1"]}, "time_step_limit is [0.1, '1'], and must be two numbers from 0"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act silu is not supported; supported: relu2"),
        ("NemotronH", {"mlp_bias": True}, "mlp_bias true is not supported beside experts"),
        ("NemotronH", {"n_groups": 3}, "mamba_num_heads 128 is not a multiple of n_groups 3"),
        ("Phi3", {"rope_scaling": _LONGROPE | {"long_factor": [10**400] * 8}}, "rope_scaling.long_factor must be"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_computed_is_named(family: str, changes: dict[str, Any], complaint: str) -> None:
    architecture = f"{family}ForCausalLM"
    raw = {"architectures": [architecture], **_SIZES, **_FAMILIES[architecture], **changes}
    with pytest.raises(SpecError) as caught:
        parse(raw, Path("config.json"))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_a_null_switch_is_false_as_in_transformers() -> None:
    raw = {"architectures": ["DeepseekV3ForCausalLM"], **_SIZES, **_FAMILIES["DeepseekV3ForCausalLM"]}
    found = [parse(raw | given, Path("config.json")) for given in ({}, {"norm_topk_prob": None})]
    assert [model.experts and model.experts.normalizes_weights for model in found] == [True, False]


def test_each_family_reads_its_own_activation() -> None:
    """Gemma's is `hidden_activation`, the others' is `hidden_act`."""
    both = _SIZES | {"hidden_activation": "gelu", "hidden_act": "silu"}
    kinds = [
        parse({"architectures": [f"{name}ForCausalLM"], **both}, Path("config.json")).activation.kind
        for name in ("Gemma2", "Phi3")
    ]
    assert kinds == ["gelu", "silu"]
