"""Small random models of every family, made by transformers, which is also the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Mistral4ForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.runner.runner import ModelRunner
from tests.engine.steps import VOCAB_SIZE

_FAMILIES = "llama mistral qwen2 qwen3 mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa"
_FAMILIES += " gemma2 gemma3 gemma4 phi3 gpt_oss glm4_moe glm4_moe_lite minimax_m2 ministral3 mistral4 llama4 olmo2"
_FAMILIES += " smollm3 granite granite_moe granite_hybrid lfm2 nemotron_h qwen3_next qwen3_5 qwen3_5_moe"
# In transformers, where they differ.
_NAMES = {name: f"{name}_text" for name in ("gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe")}
_NAMES |= {"granite_moe": "granitemoe", "granite_hybrid": "granitemoehybrid"}
CONFIGS = {family: CONFIG_MAPPING[_NAMES.get(family, family)] for family in _FAMILIES.split()}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "head_dim": 8}  # in transformers' format: heads are expanded, then rotated in part
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
DEEPSEEK_V2 = {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"} | LATENT | ROUTED
DEEPSEEK_V3 = {"q_lora_rank": 20, "n_shared_experts": 1} | LATENT | ROUTED | GROUPS
# Enough index heads that few scores are equal, because relu makes zeros.
INDEXED = {"index_n_heads": 12, "index_head_dim": 14, "index_topk": 7}
DEEPSEEK_V32 = DEEPSEEK_V3 | INDEXED
GLM_MOE_DSA = DEEPSEEK_V3 | INDEXED | {"n_group": 1, "topk_group": 1, "index_topk": 16, "num_hidden_layers": 5}
GLM_MOE_DSA |= {"indexer_types": ["full", "shared", "full", "shared", "shared"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
QUERY_SCALING = {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 20}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
# Unlike heads, keys that are values, layers that share them, embeddings per layer.
GEMMA4 = {
    "num_hidden_layers": 7,
    "sliding_window": 9,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "layer_types": [f"{kind}_attention" for kind in "sliding full sliding sliding full sliding full".split()],
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 4.0,
}
GEMMA4_MOE = {
    "sliding_window": 9,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.3, 1.5, 1.6, 1.7],
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 64,
}
PHI3 = {"head_dim": ..., "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
GPT_OSS = {
    "sliding_window": 9,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "rope_parameters": YARN | {"truncate": False},
}
GLM4_MOE = {"n_shared_experts": 1, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True} | ROUTED
GLM4_MOE_LITE = {"q_lora_rank": 20, "n_shared_experts": 1} | LATENT | ROUTED | {"head_dim": ...}
MISTRAL4 = GLM4_MOE_LITE | {"rope_parameters": YARN | QUERY_SCALING}
MINIMAX_M2 = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
LLAMA4 = {
    "num_hidden_layers": 4,  # the last one without rotation
    "num_local_experts": 6,
    "intermediate_size": 20,
    "intermediate_size_mlp": 70,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}
DELTA_NET = {
    "initializer_range": 0.05,  # with larger weights, transformers is 3e-4 off its own results in fp64
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
DELTA_NET_MOE = DELTA_NET | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
LFM2 = {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "block_multiple_of": 4, "head_dim": ...}
NEMOTRON_H = {
    "time_step_min": 1e-9,  # transformers clamps to it, instead of to time_step_limit
    "layers_block_type": [{"M": "linear_attention", "*": "full_attention", "-": "mlp"}[kind] for kind in "M-M*M-"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "ssm_state_size": 20,
    "conv_kernel": 4,
}
NEMOTRON_H_MOE = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "linear_attention"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
}
GRANITE_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,  # four ranks share them
    "mamba_d_state": 10,
    "shared_intermediate_size": 36,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
}
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that every part of the model matters to the logits
    "sliding_window": None,
    "pad_token_id": None,  # the default of some families is outside this vocabulary
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MakeModel = Callable[..., tuple[Path, PreTrainedModel]]
MakeRunner = Callable[..., ModelRunner]


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a family's config; changes: settings, ... for the family's default."""
    return CONFIGS[family](**{name: value for name, value in (TINY | changes).items() if value is not ...})


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    # Auto classes know Mistral 4 as a part of a larger model only.
    make: Any = Mistral4ForCausalLM if config.model_type == "mistral4" else AutoModelForCausalLM.from_config
    model = make(config).float().eval()
    # transformers initializes biases to 0, and norms and scales to 1, where omitting them would go unnoticed.
    around = 0.0 if config.model_type in ("gemma2", "gemma3_text") else 1.0  # those norms add 1
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or name.endswith((".scale", "per_expert_scale", "layer_scalar")):
            torch.nn.init.normal_(parameter, mean=around if "norm" in name else 1.0, std=0.3)
        elif name.endswith(("bias", "sinks", ".D")):
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 3 or name.endswith(("gate.weight", "router.weight")):  # experts and their routers
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits at every position, (T, V)."""
    return model(torch.tensor([tokens])).logits[0].float()
