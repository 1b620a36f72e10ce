"""Conversion of a GGUF file to a model directory: the JSON files of a Hugging Face checkpoint, and a tensor table.

The weights stay in the GGUF. Names and layout invert llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

from core.model.gguf_file import GGUFHeader, GGUFTensor, read_header
from core.model.gguf_table import GGML_TYPES, StoredTensor, type_name, write_table
from core.model.gguf_tokenizer import adds_bos, build_tokenizer, end_token_ids, special_token, special_token_id
from core.types.errors import SpecError

IMPORT_VERSION = 4  # increment it when the written files change, so that cached imports are made again

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SAMPLING = {f"general.sampling.{key}": key for key in ("top_k", "top_p", "min_p")} | {
    "general.sampling.temp": "temperature",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_MAX_COUNT = 1 << 31
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies (Llama 3.1)


def import_gguf(gguf: Path, into: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and the table of tensors.

    gguf: the file, or the first part of a split one; it must stay in place. into: an existing directory.
    Raises SpecError that names the file and the unsupported property.
    """
    files = [(path, read_header(path)) for path in _parts(gguf)]
    header = files[0][1]
    try:
        config = _config(header, {tensor.name for _, part in files for tensor in part.tensors})
        found = [_read_f32(path, t) for path, part in files for t in part.tensors if t.name == _ROPE_FACTORS]
        for factors in found:
            if len(factors) != config["head_dim"] // 2 or not all(0 < factor < math.inf for factor in factors):
                raise SpecError(f"tensor {_ROPE_FACTORS} does not divide the {config['head_dim'] // 2} frequencies")
            config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
        tensors = [
            _stored(tensor, path, config)
            for path, part in files
            for tensor in part.tensors
            if tensor.name != _ROPE_FACTORS
        ]
        _write_tokenizer(header.metadata, into)
    except SpecError as error:
        raise SpecError(f"{gguf}: {error}") from error
    except Exception as error:  # hostile metadata may fail anywhere in code that expects a converter's output
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"{gguf}: invalid metadata: {text}") from error
    write_table(into, tensors)
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_token_ids(header.metadata)}
    sampling = {name: value for key, name in _SAMPLING.items() if (value := header.metadata.get(key)) is not None}
    (into / "generation_config.json").write_text(json.dumps(ends | sampling, indent=2), encoding="utf-8")
    (into / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _parts(gguf: Path) -> list[Path]:
    if not (match := _SPLIT.fullmatch(gguf.name)):
        return [gguf]
    num_parts = int(match["parts"])
    parts = [gguf.with_name(f"{match['stem']}-{i:05}-of-{num_parts:05}.gguf") for i in range(1, num_parts + 1)]
    if missing := [path.name for path in parts if not path.exists()]:
        raise SpecError(f"{gguf}: other parts of this split file are missing beside it: {', '.join(missing)}")
    return parts


# Keys of factors and limits that these architectures lack, with the value that changes nothing. 0 is "not set".
_NEUTRAL = {
    "logit_scale": 1,
    "embedding_scale": 1,
    "residual_scale": 1,
    "attention.scale": 0,
    "attention.clamp_kqv": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "expert_count": 0,
}


def _config(header: GGUFHeader, names: set[str]) -> dict[str, Any]:
    """Return config.json in Hugging Face's form."""
    architecture = header.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SpecError(f"architecture {architecture!r} is not supported; supported in GGUF files: {known}")

    def value(key: str, default: Any = None) -> Any:
        found = header.metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise SpecError(f"the metadata lacks {architecture}.{key}")
        if isinstance(found, list):
            raise SpecError(f"its layers differ in {key}, which is not supported")
        return found

    def count(key: str, default: int | None = None) -> int:
        found = value(key, default)
        if type(found) is not int or not 1 <= found <= _MAX_COUNT:
            raise SpecError(f"{architecture}.{key} is {found!r}, and not a number from 1 to {_MAX_COUNT}")
        return found

    def number(key: str, default: float | None = None) -> float:
        found = value(key, default)
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise SpecError(f"{architecture}.{key} is {found!r}, and not a number above 0")
        return float(found)

    num_heads, hidden_size = count("attention.head_count"), count("embedding_length")
    num_layers = count("block_count")
    if num_layers > len(names):  # bounds the work per layer that precedes the look-up of its tensors
        raise SpecError(f"{architecture}.block_count is {num_layers}, and there are {len(names)} tensors")
    head_dim = count("attention.key_length", hidden_size // num_heads)
    for key, neutral in {"rope.dimension_count": head_dim, "attention.value_length": head_dim, **_NEUTRAL}.items():
        if (found := value(key, neutral)) not in (0, neutral):
            raise SpecError(f"{architecture}.{key} is {found!r}, which is not supported; supported: {neutral}")
    window = value("attention.sliding_window", 0) if architecture == "llama" else 0
    return {
        "architectures": ["MistralForCausalLM" if window else _ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header.metadata, architecture),
        "sliding_window": window or None,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": next((t.shape[0] for t in header.tensors if t.name == "token_embd.weight"), None)
        or len(header.metadata.get("tokenizer.ggml.tokens", ())),
        "bos_token_id": special_token_id(header.metadata, "bos"),
        "eos_token_id": special_token_id(header.metadata, "eos"),
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(metadata: dict[str, Any], architecture: str) -> dict[str, Any] | None:
    """Return the rotary scaling with llama.cpp's defaults: linear, by a factor that older files name otherwise."""
    prefix = f"{architecture}.rope.scaling."
    given = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    kind, factor = given.get("type", "linear"), given.get("factor", metadata.get(f"{architecture}.rope.scale_linear"))
    if kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor and given.get("attn_factor", 1) == 1:
        original = given.get("original_context_length", metadata.get(f"{architecture}.context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise SpecError(f"rope scaling {given} is not supported; supported in GGUF files: linear, yarn, Llama 3's")


def _stored(tensor: GGUFTensor, path: Path, config: dict[str, Any]) -> StoredTensor:
    if tensor.ggml_type not in GGML_TYPES:
        raise SpecError(
            f"tensor {tensor.name} has type {type_name(tensor.ggml_type)}, which is not supported; use "
            f"a file of type Q4_K_M, Q8_0 or IQ4_XS; supported: {', '.join(kind.name for kind in GGML_TYPES.values())}"
        )
    kind, row = GGML_TYPES[tensor.ggml_type], tensor.shape[-1] if len(tensor.shape) > 1 else 1
    if row % kind.block:  # a slice of rows would not start at a block boundary
        raise SpecError(
            f"tensor {tensor.name} of shape {tensor.shape} has rows that are not whole blocks of {kind.name}"
        )
    role = tensor.name.rsplit(".", 1)[0].rsplit(".", 1)[-1]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = StoredTensor(
        name=_hugging_face_name(tensor.name),
        ggml_type=tensor.ggml_type,
        shape=tensor.shape,
        file=str(path.absolute()),
        offset=tensor.offset,
        interleaved_heads=heads.get(role, 0) if config["model_type"] == "llama" else 0,
    )
    if stored.offset + stored.num_bytes > path.stat().st_size:
        raise SpecError(f"{path.name} ends before tensor {tensor.name} does; is the download complete?")
    return stored


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        raise SpecError(
            f"tensor {name} scales another one, as in NVFP4 files: not supported; use a Q4_K_M or Q8_0 file"
        )
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{suffix}"
    match stem.split("."):
        case ["blk", layer, role] if role in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[role]}.{suffix}"
    raise SpecError(f"tensor {name} does not belong to a dense Llama or Qwen model")


def _read_f32(path: Path, tensor: GGUFTensor) -> list[float]:
    if GGML_TYPES.get(tensor.ggml_type, ("",))[0] != "F32":
        raise SpecError(f"tensor {tensor.name} is not stored as F32")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[-1]}f", file.read(4 * tensor.shape[-1])))


def _write_tokenizer(metadata: dict[str, Any], into: Path) -> None:
    build_tokenizer(metadata).save(str(into / "tokenizer.json"))
    prefix = "tokenizer.chat_template"
    template = metadata.get(prefix)
    named = {key.removeprefix(f"{prefix}."): text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    if named:
        named |= {} if template is None else {"default": template}
        template = [{"name": name, "template": text} for name, text in named.items()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special_token(metadata, "bos"),
        "eos_token": special_token(metadata, "eos"),
        "unk_token": special_token(metadata, "unknown"),
        "pad_token": special_token(metadata, "padding"),
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    written = {key: value for key, value in config.items() if value is not None}
    (into / "tokenizer_config.json").write_text(json.dumps(written, ensure_ascii=False, indent=2), encoding="utf-8")
