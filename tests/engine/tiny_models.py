"""Small random models of every family, made by transformers, which is also the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.runner.runner import ModelRunner
from tests.engine.steps import VOCAB_SIZE

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
LATENT |= {
    "num_key_value_heads": 4,
    "head_dim": 8,
}  # in transformers' format: heads are expanded, then rotated in part
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
DEEPSEEK_V2 = {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"} | LATENT | ROUTED
DEEPSEEK_V3 = {"q_lora_rank": 20, "n_shared_experts": 1} | LATENT | ROUTED | GROUPS
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
}

MakeModel = Callable[..., tuple[Path, PreTrainedModel]]
MakeRunner = Callable[..., ModelRunner]


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    return CONFIGS[family](**(TINY | changes))


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # transformers initializes biases to 0 and norms to 1, where omitting them would go unnoticed.
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits at every position, (T, V)."""
    return model(torch.tensor([tokens])).logits[0].float()
