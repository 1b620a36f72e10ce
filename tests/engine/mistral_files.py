"""Models in Mistral's own format, converted from transformers' by the format's definition, not with our code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.engine.quantized_files import Quantised, fp8_tensor

_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "q_a_layernorm": "q_a_norm",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "wkv_b",
    **{f"{one}_proj": f"w{one}" for one in "qkvo"},
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
_LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}
FP8 = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}


def fp8(w: Tensor) -> Quantised:
    """Mistral's: one scale per matrix, and one of its inputs."""
    parts, numbers = fp8_tensor(w)
    scale = parts["weight_scale"]
    return {"weight": parts["weight"], "qscale_weight": scale, "qscale_act": torch.tensor(0.5)}, numbers


def nvfp4(w: Tensor) -> Quantised:
    """compressed-tensors: two codes per byte, the low half first; scales are divided by the global one."""
    groups = w.unflatten(1, (-1, 16))
    factor = torch.tensor([448 * 6 / float(w.abs().max())])
    scales = (groups.abs().amax(2) / 6 * factor).to(torch.float8_e4m3fn)
    steps = (scales.float() / factor).unsqueeze(2)
    codes = ((groups / steps).abs().unsqueeze(-1) - _LEVELS).abs().argmin(-1)
    numbers = (_LEVELS[codes] * groups.sign() * steps).flatten(1)
    nibbles = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": factor}
    return parts | {"input_global_scale": torch.ones(1)}, numbers


def write_mistral(
    directory: Path,
    model: PreTrainedModel,
    *,
    quantise: Callable[[Tensor], Quantised] | None = None,
    matrices: str = r".*\.w[qkvo123](_.*)?",
    num_parts: int = 0,
    **params: Any,
) -> None:
    """Write params.json and consolidated*.safetensors. Numbers of quantized matrices replace those of `model`.

    matrices: regular expression of the names to quantize. num_parts: files with an index; 0: one without. params:
    keys of params.json beside those of the config; None leaves a key out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, matrix, num_heads in _matrices(model):
        own = _pairs(matrix, num_heads)
        if quantise is None or not re.fullmatch(matrices, name):
            tensors[f"{name}.weight"] = own.clone()
            continue
        parts, numbers = quantise(own)
        matrix.copy_(_halves(numbers, num_heads))
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    written = {key: value for key, value in (_params(model.config) | params).items() if value is not None}
    (directory / "params.json").write_text(json.dumps(written))
    if not num_parts:
        save_file(tensors, directory / "consolidated.safetensors")
        return
    files = [f"consolidated-{i + 1:05}-of-{num_parts:05}.safetensors" for i in range(num_parts)]
    file_of = {name: files[i % num_parts] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, directory / file)
    (directory / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, int]]:
    """Yield Mistral's name of each tensor, its numbers, which may be changed, and the rotated heads in its rows."""
    config, is_latent = model.config, hasattr(model.config, "kv_lora_rank")
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    experts = "feed_forward." if config.model_type == "mixtral" else ""
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, inner = name.removesuffix(".weight").removeprefix("model.").rpartition(".mlp.")
        if inner.startswith("experts."):
            for number, matrix in enumerate(parameter):
                parts = {"w1": matrix.chunk(2)[0], "w3": matrix.chunk(2)[1]} if "gate_up" in inner else {"w2": matrix}
                yield from ((f"{layer}.{experts}experts.{number}.{own}", part, 0) for own, part in parts.items())
            continue
        if layer and inner == "gate":
            yield f"{layer}.{experts}gate", parameter, 0
            continue
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            block, _, last = stem.removeprefix("model.").rpartition(".")
            block = block.replace(".self_attn", ".attention").replace(".mlp.shared_experts", ".shared_experts")
            own = f"{block.replace('.mlp', '.feed_forward')}.{_NAMES[last]}"
        else:
            own = _NAMES[stem]
        yield own, parameter, 0 if is_latent else heads.get(own.rpartition(".")[2], 0)


def _pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Put the two features of a rotary pair beside each other; transformers has them half a head apart."""
    return rows.view(num_heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape) if num_heads else rows


def _halves(rows: Tensor, num_heads: int) -> Tensor:
    return rows.view(num_heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape) if num_heads else rows


def _params(config: PreTrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": rope["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "sliding_window": getattr(config, "sliding_window", None),
        "tied_embeddings": config.tie_word_embeddings,
    }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        params["yarn"] = {"original_max_position_embeddings": original, "factor": rope["factor"]}
        params["yarn"] |= {"beta": 32, "alpha": 1, "apply_scale": rope.get("attention_factor") != 1}
        if beta := rope.get("llama_4_scaling_beta"):
            params["llama_4_scaling"] = {"original_max_position_embeddings": original, "beta": beta}
    if config.model_type == "mixtral":
        params["moe"] = {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
    if config.model_type == "mistral4":
        for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            params[key] = getattr(config, key)
        params["moe"] = {
            "num_experts": config.n_routed_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "expert_hidden_dim": config.moe_intermediate_size,
            "first_k_dense_replace": config.first_k_dense_replace,
            "num_shared_experts": config.n_shared_experts,
            "routed_scale": config.routed_scaling_factor,
            "route_every_n": 1,
            "num_expert_groups": 1,
            "num_expert_groups_per_tok": 1,
        }
    return params
