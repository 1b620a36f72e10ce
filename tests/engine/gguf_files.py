"""GGUF files of a transformers model, as llama.cpp's conversion/*.py writes each architecture.

Names come from the gguf package's own table, and numbers from the model's parameters: nothing from our code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel

VOCABULARY = [*(chr(ord("!") + i) for i in range(94)), "ab"]  # single characters of the byte alphabet, and one merge
Named = Iterator[tuple[str, np.ndarray]]
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    quantized: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    is_absorbed: bool = True,
    splits_experts: bool = False,
) -> None:
    """Write a model, and round the model itself to the stored numbers.

    quantized: type of the matrices. metadata: keys that replace the converter's. is_absorbed: keys and values of
    latents are separate tensors, as in files since 2025. splits_experts: each expert has its own tensors, as in files
    before April 2024.
    """
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = _Writer(path, architecture, dict(metadata or {}))
    _PARAMETERS[architecture](writer, config)
    if architecture == "deepseek2" and not is_absorbed:
        writer.overrides |= {
            "deepseek2.attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "deepseek2.attention.value_length": config.v_head_dim,
            "deepseek2.attention.head_count_kv": config.num_attention_heads,
        }
    add_tokenizer(writer, config.vocab_size)
    names = _names(architecture, config)
    for name, values in _tensors(model, architecture, is_absorbed=is_absorbed):
        is_matrix = values.ndim > 1 and not name.endswith((".bias", "mlp.gate.weight", "mlp.router.weight"))
        kind = GGMLQuantizationType[quantized if is_matrix else "F32"]
        rows = np.ascontiguousarray(values)
        stored = _stored(rows if rows.ndim < 4 else rows.reshape(-1, rows.shape[-1]), kind)
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None, name
        stem, is_stacked, suffix = stored_name.partition("_exps.")
        for expert, part in enumerate(stored if is_stacked and splits_experts else ()):
            writer.add_tensor(f"{stem}.{expert}.{suffix}", part, raw_dtype=kind)
        if not (is_stacked and splits_experts):
            writer.add_tensor(stored_name, stored, raw_dtype=kind)
        if kind != GGMLQuantizationType.F32:
            # `values` is a view of the parameter.
            values[...] = gguf.quants.dequantize(stored, kind).reshape(values.shape)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    if architecture == "phi3":
        _add_phi3_divisors(writer, config)
    for key, value in writer.overrides.items():
        is_count = type(value) is int
        writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value))
    finish(writer)


class _Writer(GGUFWriter):
    """GGUF writer that leaves out the keys that `overrides` sets."""

    def __init__(self, path: Path, architecture: str, overrides: dict[str, Any]) -> None:
        self.overrides: dict[str, Any] = {}
        super().__init__(path, architecture)
        self.overrides = overrides

    def add_key_value(self, key: str, val: Any, *arguments: Any, **more: Any) -> None:
        if key not in self.overrides or val is self.overrides[key]:
            super().add_key_value(key, val, *arguments, **more)


def _stored(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantize numbers; small random ones take their place if the gguf package only dequantizes the type."""
    try:
        stored: np.ndarray = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        blocks = random_blocks(kind, values.size // block)
        if kind.name == "Q4_K":
            scales = blocks[:, :4].copy().view(np.float16)
            blocks[:, :4] = (scales * np.float16(0.02)).view(np.uint8)
        stored = blocks.reshape(*values.shape[:-1], -1)
    return stored


def _tensors(model: PreTrainedModel, architecture: str, *, is_absorbed: bool) -> Named:
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    }
    rotated = _rotated_heads(model.config) if architecture == "llama" else {}
    for name, tensor in tensors.items():
        values = tensor.detach().numpy()
        if count := rotated.get(name.split(".")[-2]):
            pairs = _in_pairs(values, count)  # a view, so that the numbers can be rounded in place
            yield name, pairs if values.ndim > 1 else pairs.reshape(values.shape)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            yield name, values + 1
        elif ".mlp.experts." in name:
            yield from _experts(name, values, is_transposed=architecture == "gpt-oss")
        elif name.endswith("kv_b_proj.weight") and is_absorbed:
            config = model.config
            heads = values.reshape(config.num_attention_heads, -1, values.shape[-1])
            yield name.replace("kv_b_proj", "k_b_proj"), heads[:, : config.qk_nope_head_dim].transpose(0, 2, 1)
            yield name.replace("kv_b_proj", "v_b_proj"), heads[:, config.qk_nope_head_dim :]
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            yield f"{name}.weight" if name.endswith("sinks") else name, values


def _experts(name: str, values: np.ndarray, *, is_transposed: bool) -> Named:
    """Split gate and up: the halves of the rows, or in gpt-oss every other column of a transposed matrix."""
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    stem = name.removesuffix("_bias")
    rows = values if suffix == ".bias" or not is_transposed else values.transpose(0, 2, 1)
    if stem.endswith("down_proj"):
        yield stem + suffix, rows
        return
    half = rows.shape[1] // 2
    gate, up = (rows[:, ::2], rows[:, 1::2]) if is_transposed else (rows[:, :half], rows[:, half:])
    yield stem.replace("gate_up_proj", "gate_proj") + suffix, gate
    yield stem.replace("gate_up_proj", "up_proj") + suffix, up


def _common(writer: GGUFWriter, config: Any, *, num_kv_heads: int | None = None, head_dim: int | None = None) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(num_kv_heads or config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    if whole["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
    if whole["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if key in whole:
                getattr(writer, f"add_rope_scaling_yarn_{key}")(whole[key])
    if config.model_type != "gemma2":  # whose converter leaves it out
        writer.add_rope_freq_base(whole["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    for key, add in (
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
    ):
        if getattr(config, key, None) is not None:
            add(getattr(config, key))
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _dense(writer: GGUFWriter, config: Any) -> None:
    _common(writer, config, head_dim=config.head_dim)
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)


def _gemma2(writer: GGUFWriter, config: Any) -> None:
    _dense(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _gemma3(writer: GGUFWriter, config: Any) -> None:
    _dense(writer, config)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _phi3(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    _common(writer, config)
    writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", config.max_position_embeddings))
    share = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(share * config.hidden_size) // config.num_attention_heads)
    writer.add_sliding_window(config.sliding_window or 0)


def _add_phi3_divisors(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if "long_factor" not in rope:
        return
    original = rope["original_max_position_embeddings"]
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for length in ("long", "short"):
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))


def _qwen3_moe(writer: GGUFWriter, config: Any) -> None:
    _common(writer, config, head_dim=config.head_dim)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _gpt_oss(writer: GGUFWriter, config: Any) -> None:
    _dense(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _glm4_moe(writer: GGUFWriter, config: Any) -> None:
    _common(writer, config, head_dim=config.head_dim)
    share = config.rope_parameters.get("partial_rotary_factor", 0.5)
    writer.add_rope_dimension_count(int(config.head_dim * share))
    _add_routed(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _deepseek2(writer: GGUFWriter, config: Any) -> None:
    _common(writer, config, num_kv_heads=1)
    _add_routed(writer, config)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    latents = config.kv_lora_rank
    writer.add_kv_lora_rank(latents)
    writer.add_key_length(latents + config.qk_rope_head_dim)
    writer.add_value_length(latents)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type == "deepseek_v3":  # the others' configs have no scoring_func
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def _add_routed(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    kinds = getattr(config, "mlp_layer_types", None)
    writer.add_leading_dense_block_count(kinds.index("sparse") if kinds else config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)


_PARAMETERS: dict[str, Callable[[GGUFWriter, Any], None]] = {
    "llama": _dense,
    "qwen2": _dense,
    "qwen3": _dense,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "qwen3moe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
}


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokens = (VOCABULARY + [f"[{i}]" for i in range(vocab_size)])[:vocab_size]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens[:-1], "<|end|>"])
    writer.add_token_types([1] * (vocab_size - 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(vocab_size - 1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_model(path: Path, model: PreTrainedModel) -> None:
    """Fill a transformers Llama with the dequantized tensors of a GGUF file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names, heads = _names("llama", model.config), _rotated_heads(model.config)
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
        if count := heads.get(name.split(".")[-2]):
            values = values.reshape(count, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        parameter.data = torch.from_numpy(values.copy())
    assert not tensors


def _names(architecture: str, config: Any) -> gguf.TensorNameMap:
    kind_of = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(kind_of[architecture], config.num_hidden_layers)


def _rotated_heads(config: Any) -> dict[str, int]:
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}


def _in_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute like convert_hf_to_gguf.py's LlamaModel.permute: row i + D/2 of a head moves behind row i."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2)


def random_blocks(kind: GGMLQuantizationType, num_blocks: int) -> np.ndarray:
    """Return random codes: any bytes are valid, except that the scales must be finite."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    if kind.name in ("MXFP4", "NVFP4"):  # scales are bytes
        blocks[:, : 1 if kind.name == "MXFP4" else 4] = 100
        return blocks
    if kind.name == "IQ1_M":  # the scale is in four half bytes
        blocks[:, 49::2] &= 15
        blocks[:, 55] |= 32
        return blocks
    scales_at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    scales_at |= {"TQ1_0": (52,), "TQ2_0": (64,)}
    for at in scales_at.get(kind.name, (0, 2) if kind.name in ("Q4_1", "Q5_1") else (0,)):
        blocks[:, at : at + 2] = np.linspace(-1e-2, 1e-2, num_blocks, dtype=np.float16).view(np.uint8).reshape(-1, 2)
    return blocks
