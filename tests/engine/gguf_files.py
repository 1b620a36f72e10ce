"""GGUF files as llama.cpp's converter writes them; written and read with the gguf package, not with our code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

VOCABULARY = [*(chr(ord("!") + i) for i in range(94)), "ab"]  # single characters of the byte alphabet, and one merge
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    quantized: GGMLQuantizationType,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    """Write a transformers model to a GGUF file with quantized matrices, and round the model itself to the stored
    values. Codes of a type that gguf cannot write are random.

    `metadata` and `extra` tensors are written, too.
    """
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(writer, config.vocab_size)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        stored_name = gguf_name(name)
        values = parameter.detach().numpy()
        if architecture == "llama" and (count := heads.get(stored_name.split(".")[-2])):
            values = interleave(values, count)
        kind = quantized if values.ndim == 2 else GGMLQuantizationType.F32
        stored = _stored(values, kind)
        writer.add_tensor(stored_name, stored, raw_dtype=kind)
        rounded = gguf.quants.dequantize(stored, kind).reshape(values.shape)
        if architecture == "llama" and (count := heads.get(stored_name.split(".")[-2])):
            rounded = deinterleave(rounded, count)
        parameter.data = torch.from_numpy(rounded.copy())
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)


def _stored(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(kind, values.size // gguf.GGML_QUANT_SIZES[kind][0]).reshape(len(values), -1)


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


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, role = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[role]}.{suffix}"
    return f"{NAMES[stem]}.{suffix}"


def read_model(path: Path, model: PreTrainedModel) -> None:
    """Fill a transformers Llama with the dequantized tensors of a GGUF file."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(gguf_name(name))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
        if count := heads.get(tensor.name.split(".")[-2]):
            values = deinterleave(values, count)
        parameter.data = torch.from_numpy(values.copy())
    assert not tensors


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute like convert_hf_to_gguf.py's LlamaModel.permute: row i + D/2 of a head moves behind row i."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


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
