"""Small random EAGLE-1 head in the published format, and its reference by the paper's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.engine.spec_decode.heads.head_files import (
    DIM,
    FEATURES,
    HEADS,
    HIDDEN,
    Choice,
    attended,
    chained,
    likeliest,
    normed,
    save_heads,
    states_of,
)
from tests.engine.steps import VOCAB_SIZE
from tests.engine.tiny_models import TINY

# T tokens, E hidden_size


def write_eagle1(
    directory: Path, *, has_biases: bool = True, has_copies: bool = False, **changes: Any
) -> dict[str, Tensor]:
    # small weights, because no norm limits the output to the size of features
    generator = torch.Generator().manual_seed(4)

    def weight(*shape: int, std: float = 0.12) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {
        "fc.weight": weight(HIDDEN, 2 * HIDDEN),
        "layers.0.post_attention_layernorm.weight": 1 + weight(HIDDEN),
        "layers.0.self_attn.q_proj.weight": weight(HEADS * DIM, HIDDEN),
        "layers.0.self_attn.k_proj.weight": weight(TINY["num_key_value_heads"] * DIM, HIDDEN),
        "layers.0.self_attn.v_proj.weight": weight(TINY["num_key_value_heads"] * DIM, HIDDEN),
        "layers.0.self_attn.o_proj.weight": weight(HIDDEN, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": weight(FEATURES, HIDDEN),
        "layers.0.mlp.up_proj.weight": weight(FEATURES, HIDDEN),
        "layers.0.mlp.down_proj.weight": weight(HIDDEN, FEATURES),
    }
    if has_biases:
        names = ("fc", *(f"layers.0.self_attn.{name}_proj" for name in "qkv"))
        tensors |= {f"{name}.bias": weight(len(tensors[f"{name}.weight"])) for name in names}
    if has_copies:
        tensors |= {name: torch.zeros(VOCAB_SIZE, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_heads(directory, TINY | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1} | changes, tensors)
    return tensors


@torch.inference_mode()
def eagle1_reference(
    model: PreTrainedModel,
    tensors: dict[str, Tensor],
    tokens: list[int],
    num_tokens: int,
    *,
    choose: Choice = likeliest,
) -> list[int]:
    """Return the head's draft after `tokens`: Li et al. 2024, section 4.1."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return chained(
        states_of(model, tokens)[-1],  # normed
        lambda ids, feature_TE: _layer(tensors, embeddings[ids], feature_TE),
        lambda x_E: head @ x_E,
        tokens,
        num_tokens,
        choose=choose,
    )


def _layer(tensors: dict[str, Tensor], embedded_TE: Tensor, feature_TE: Tensor) -> Tensor:
    def of(name: str, x: Tensor) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    x_TE = of("fc", torch.cat((embedded_TE, feature_TE), dim=-1))
    x_TE = x_TE + of(
        "layers.0.self_attn.o_proj", attended(*(of(f"layers.0.self_attn.{name}_proj", x_TE) for name in "qkv"))
    )
    mlp_TE = normed(x_TE, tensors["layers.0.post_attention_layernorm.weight"])
    gated = F.silu(of("layers.0.mlp.gate_proj", mlp_TE)) * of("layers.0.mlp.up_proj", mlp_TE)
    return x_TE + of("layers.0.mlp.down_proj", gated)
