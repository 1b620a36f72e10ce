"""Files of published models, in the forms of their time: read as transformers reads them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from core.model.config import parse
from core.model.shape import ModelConfig

_YARN = {"type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096}
_SIZES = {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_SIZES |= {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 12,
    "max_position_embeddings": 131072,
    "vocab_size": 200064,
}
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_ROUTED = {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
_ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_LOCAL = {"num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False}
_DIVISORS = {"short_factor": [1.0 + i / 64 for i in range(48)], "long_factor": [2.0 + i for i in range(48)]}

# Architecture; settings, of the text model if it is a part of a larger one.
_FLAT: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 2": (
        "Gemma2ForCausalLM",
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 128}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 144}
        | {"hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_key_value_heads": 16}
        | {"num_hidden_layers": 46, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096},
    ),
    "gemma 3 1b": (
        "Gemma3ForCausalLM",
        {"model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912}
        | {
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32768,
        }
        | {"rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": 512}
        | {"sliding_window_pattern": 6, "attn_logit_softcapping": None, "vocab_size": 262144},
    ),
    "phi 3 128k": (
        "Phi3ForCausalLM",
        _SIZES
        | {"model_type": "phi3", "hidden_size": 3072, "num_key_value_heads": 32, "tie_word_embeddings": False}
        | {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "sliding_window": 262144}
        | {"rope_theta": 10000.0, "rope_scaling": {"type": "su"} | _DIVISORS, "attention_bias": False},
    ),
    "phi 4 mini": (
        "Phi3ForCausalLM",
        _SIZES
        | {"model_type": "phi3", "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "lm_head_bias": False}
        | {"original_max_position_embeddings": 4096, "interpolate_factor": 1, "full_attn_mod": 1, "mlp_bias": False}
        | {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope"} | _DIVISORS, "sliding_window": 262144},
    ),
    "minimax m2": (
        "MiniMaxM2ForCausalLM",
        _SIZES
        | _LOCAL
        | {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "use_qk_norm": True}
        | {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True, "use_mtp": True}
        | {"num_mtp_modules": 3, "shared_intermediate_size": 0, "attn_type_list": [1] * 12},
    ),
    "minimax m2, rotary settings of transformers 5": (
        "MiniMaxM2ForCausalLM",
        _SIZES
        | _LOCAL
        | {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000}},
    ),
    "gpt oss": (
        "GptOssForCausalLM",
        _SIZES
        | _LOCAL
        | {"model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "initial_context_length": 4096}
        | {"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"rope_theta": 150000, "rope_scaling": _YARN | {"factor": 32.0, "truncate": False, "rope_type": "yarn"}},
    ),
    "gpt oss, defaults": ("GptOssForCausalLM", _SIZES | _LOCAL | {"model_type": "gpt_oss"}),
    "gpt oss, rope_theta alone": (
        "GptOssForCausalLM",
        _SIZES | _LOCAL | {"model_type": "gpt_oss", "rope_theta": 10000.0},
    ),
    "gemma 2, nulls": (
        "Gemma2ForCausalLM",
        _SIZES
        | {"model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": None, "head_dim": 128}
        | {"sliding_window": None},
    ),
    "mistral, defaults": ("MistralForCausalLM", _SIZES | {"model_type": "mistral"}),
    "mixtral, defaults": ("MixtralForCausalLM", _SIZES | {"model_type": "mixtral"} | _LOCAL),
    "glm 4.5": (
        "Glm4MoeForCausalLM",
        _SIZES
        | _ROUTED
        | {"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "routed_scaling_factor": 2.5}
        | {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000}
        | {"use_qk_norm": True, "rms_norm_eps": 1e-05},
    ),
    "glm 4.7 flash": (
        "Glm4MoeLiteForCausalLM",
        _SIZES
        | _ROUTED
        | _LATENT
        | {"model_type": "glm4_moe_lite", "num_key_value_heads": 32, "topk_method": "noaux_tc", "rope_theta": 1000000}
        | {"partial_rotary_factor": 1.0, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1},
    ),
    "nemotron h": (
        "NemotronHForCausalLM",
        {"model_type": "nemotron_h", "eos_token_id": 2, "conv_kernel": 4, "expand": 2, "hidden_size": 4096}
        | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "head_dim": 128}
        | {"intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_num_heads": 128}
        | {"max_position_embeddings": 8192, "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32}
        | {"num_hidden_layers": 52, "num_key_value_heads": 8, "ssm_state_size": 128, "time_step_limit": [0.0, inf]}
        | {"use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False, "vocab_size": 131072}
        | {"time_step_min": 0.001, "time_step_max": 0.1, "rescale_prenorm_residual": True, "residual_in_fp32": False},
    ),
    "nemotron 3 nano": (
        "NemotronHForCausalLM",
        {"model_type": "nemotron_h", "eos_token_id": 2, "conv_kernel": 4, "expand": 2, "hidden_size": 2688}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128}
        | {"intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_num_heads": 64}
        | {"max_position_embeddings": 262144, "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32}
        | {"num_hidden_layers": 52, "num_key_value_heads": 2, "ssm_state_size": 128, "time_step_limit": [0.0, inf]}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
        | {"moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "partial_rotary_factor": 1.0, "rope_theta": 10000, "vocab_size": 131072},
    ),
    "qwen 3": (
        "Qwen3ForCausalLM",
        _SIZES
        | {"model_type": "qwen3", "max_window_layers": 12, "rope_scaling": None, "rope_theta": 1000000}
        | {"sliding_window": None, "use_sliding_window": False, "head_dim": 128},
    ),
    "mistral": (
        "MistralForCausalLM",
        _SIZES | {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        _SIZES
        | _ROUTED
        | _LATENT
        | {"model_type": "deepseek_v3", "num_key_value_heads": 32, "n_group": 8, "topk_group": 4, "rope_theta": 10000}
        | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5}
        | {"num_nextn_predict_layers": 1}
        | {"rope_scaling": _YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek v3.2": (
        "DeepseekV32ForCausalLM",
        _SIZES
        | _ROUTED
        | _LATENT
        | {"model_type": "deepseek_v32", "num_key_value_heads": 32, "n_group": 8, "topk_group": 4, "rope_theta": 10000}
        | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "num_nextn_predict_layers": 1}
        | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5}
        | {"rope_scaling": _YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "glm 5": (
        "GlmMoeDsaForCausalLM",
        _SIZES
        | _ROUTED
        | _LATENT
        | {"model_type": "glm_moe_dsa", "num_key_value_heads": 32, "qk_nope_head_dim": 192, "v_head_dim": 256}
        | {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True}
        | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "num_nextn_predict_layers": 1},
    ),
    "glm 5, one indexer for four layers": (
        "GlmMoeDsaForCausalLM",
        _SIZES | _ROUTED | _LATENT | {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    ),
    "glm 5, pattern": (
        "GlmMoeDsaForCausalLM",
        _SIZES | _ROUTED | _LATENT | {"model_type": "glm_moe_dsa", "index_topk_pattern": "FSSF" * 3},
    ),
    "sparse attention, defaults": (
        "DeepseekV32ForCausalLM",
        _SIZES | _LATENT | {"model_type": "deepseek_v32", "moe_intermediate_size": 1408},
    ),
}
_NESTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma 3 4b, sparse": (
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        {"eos_token_id": [1, 106], "mm_tokens_per_image": 256},
    ),
    "mistral small 3.1": (
        "Mistral3ForConditionalGeneration",
        _SIZES | {"model_type": "mistral", "head_dim": 128, "rope_theta": 1000000000.0, "sliding_window": None},
        {"spatial_merge_size": 2},
    ),
    "ministral 3": (
        "Mistral3ForConditionalGeneration",
        _SIZES
        | {"model_type": "ministral3", "head_dim": 128, "sliding_window": None, "tie_word_embeddings": True}
        | {
            "rope_parameters": _YARN
            | {"factor": 16.0, "rope_type": "yarn", "rope_theta": 1000000.0, "llama_4_scaling_beta": 0.1}
            | {"mscale": 1.0, "mscale_all_dim": 1.0}
        },
        {"tie_word_embeddings": True},
    ),
    "llama 4 scout": (
        "Llama4ForConditionalGeneration",
        _SIZES
        | {"model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "interleave_moe_layer_step": 1}
        | {"intermediate_size_mlp": 16384, "no_rope_layers": [], "num_experts_per_tok": 1, "num_local_experts": 16}
        | {"rope_theta": 500000.0, "use_qk_norm": True, "rms_norm_eps": 1e-05, "for_llm_compressor": False}
        | {
            "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
            | {"original_max_position_embeddings": 8192}
        },
        {"tie_word_embeddings": False},
    ),
    "qwen 3 vl": (
        "Qwen3VLForConditionalGeneration",
        _SIZES
        | {"model_type": "qwen3_vl_text", "head_dim": 128, "rope_theta": 5000000, "tie_word_embeddings": True}
        | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}},
        {"tie_word_embeddings": True},
    ),
    "kimi k2.5": (
        "KimiK25ForConditionalGeneration",
        _SIZES
        | _ROUTED
        | _LATENT
        | {"model_type": "kimi_k2", "num_key_value_heads": 32, "rope_theta": 50000.0, "routed_scaling_factor": 2.827}
        | {"ep_size": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        | {"num_nextn_predict_layers": 0}
        | {"rope_scaling": _YARN | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"tie_word_embeddings": False},
    ),
    "glm 4.5 v": (
        "Glm4vMoeForConditionalGeneration",
        _SIZES
        | _ROUTED
        | {"model_type": "glm4v_moe_text", "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5}
        | {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
        {"tie_word_embeddings": False},
    ),
}


def _as_transformers_reads(raw: dict[str, Any]) -> ModelConfig:
    kind = {"kimi_k2": "deepseek_v3"}.get(raw["model_type"], raw["model_type"])
    if raw.get("rope_scaling", {}) and raw.get("rope_scaling", {}).get("type") == "su":  # no longer known there
        raw = raw | {"rope_scaling": raw["rope_scaling"] | {"type": "longrope"}}
    read = CONFIG_MAPPING[kind](**raw).to_dict() | {"model_type": raw["model_type"]}
    return _without_mtp(parse({"text_config": read}, Path("theirs")))


def _without_mtp(config: ModelConfig) -> ModelConfig:
    """Leave out the MTP layers, which some classes of transformers forget."""
    return replace(config, num_further_layers=0)


@pytest.mark.parametrize("name", _FLAT)
def test_a_published_config(name: str) -> None:
    architecture, raw = _FLAT[name]
    assert _without_mtp(parse({"architectures": [architecture], **raw}, Path("ours"))) == _as_transformers_reads(raw)


@pytest.mark.parametrize("name", _NESTED)
def test_a_published_config_of_a_text_part(name: str) -> None:
    architecture, text, whole = _NESTED[name]
    ours = parse({"architectures": [architecture], **whole, "text_config": text}, Path("ours"))
    common = {name: whole[name] for name in ("tie_word_embeddings", "eos_token_id") if name in whole}
    assert _without_mtp(ours) == _as_transformers_reads(text | common)


def test_parameters_of_nemotron_3_nano() -> None:
    """NVIDIA's report counts 31.6 billion parameters, the embeddings included."""
    architecture, raw = _FLAT["nemotron 3 nano"]
    assert round(parse({"architectures": [architecture], **raw}, Path("ours")).num_parameters / 1e9, 1) == 31.6
