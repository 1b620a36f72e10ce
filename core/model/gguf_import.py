"""Conversion of a GGUF file to a model directory: the JSON files of a Hugging Face checkpoint, and a tensor table.

The weights stay in the GGUF. Names and layout invert llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from core.model.gguf_architectures import ARCHITECTURES, GGUFMetadata, read_config, rows_of, stored_names
from core.model.gguf_file import GGML_TYPES, GGUFHeader, GGUFTensor, StoredTensor, read_header, type_name, write_table
from core.model.gguf_tokenizer import adds_bos, build_tokenizer, end_token_ids, special_token, special_token_id
from core.types.errors import SpecError

IMPORT_VERSION = 4  # increment it when the written files change, so that cached imports are made again

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_LAYER = re.compile(r"blk\.(\d+)\.")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SAMPLING = {f"general.sampling.{key}": key for key in ("top_k", "top_p", "min_p")} | {
    "general.sampling.temp": "temperature",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
# Divisors of the rotary frequencies: tensors in GGUF, settings in Hugging Face's form.
_VECTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


def import_gguf(gguf: Path, into: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and the table of tensors.

    gguf: the file, or the first part of a split one; it must stay in place. into: an existing directory.
    Raises SpecError that names the file and the unsupported property.
    """
    files = [(path, read_header(path)) for path in _parts(gguf)]
    header = files[0][1]
    try:
        architecture, config = _config(files)
        # Blocks after the model's layers predict further tokens.
        further = range(config["num_hidden_layers"], header.metadata[f"{architecture}.block_count"])
        tensors = [
            stored
            for path, part in files
            for tensor in part.tensors
            if not (match := _LAYER.match(tensor.name)) or int(match[1]) not in further
            for stored in _stored(tensor, path, config, architecture)
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


def _config(files: Sequence[tuple[Path, GGUFHeader]]) -> tuple[str, dict[str, Any]]:
    """Return the architecture, and config.json in Hugging Face's form."""
    metadata = files[0][1].metadata
    if (kind := metadata.get("general.type", "model")) != "model":
        raise SpecError(f"it holds no model: general.type is {kind!r}, such as an adapter or an image projector")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SpecError(f"architecture {architecture!r} is not supported; supported in GGUF files: {known}")
    tensors = {tensor.name: (path, tensor) for path, part in files for tensor in part.tensors}
    vectors = {name: _read_f32(*tensors[f"{name}.weight"]) for name in _VECTORS if f"{name}.weight" in tensors}
    config = read_config(architecture, GGUFMetadata(metadata, frozenset(tensors), vectors, architecture))
    pairs = int(config["head_dim"] * config.get("partial_rotary_factor", 1)) // 2
    for name, divisors in vectors.items():
        if len(divisors) != pairs or not all(0 < divisor < math.inf for divisor in divisors):
            raise SpecError(f"tensor {name}.weight does not divide the {pairs} frequencies")
    vocab_size = tensors["token_embd.weight"][1].shape[0] if "token_embd.weight" in tensors else 0
    return architecture, config | {
        "vocab_size": vocab_size or len(metadata.get("tokenizer.ggml.tokens", ())),
        "bos_token_id": special_token_id(metadata, "bos"),
        "eos_token_id": special_token_id(metadata, "eos"),
    }


def _stored(tensor: GGUFTensor, path: Path, config: dict[str, Any], architecture: str) -> list[StoredTensor]:
    """Return the matrices in a tensor, under Hugging Face's names; none for rotary divisors."""
    if tensor.name.removesuffix(".weight") in _VECTORS:
        return []
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
    whole = StoredTensor(
        name=tensor.name,
        ggml_type=tensor.ggml_type,
        shape=tensor.shape,
        file=str(path.absolute()),
        offset=tensor.offset,
    )
    if whole.offset + whole.num_bytes > path.stat().st_size:
        raise SpecError(f"{path.name} ends before tensor {tensor.name} does; is the download complete?")
    return list(_matrices(whole, config, architecture))


def _matrices(whole: StoredTensor, config: dict[str, Any], architecture: str) -> Iterator[StoredTensor]:
    """Yield the matrices in the rows of a tensor. whole: the tensor under its own name."""
    names = _hugging_face_names(whole.name, architecture)
    num_rows = whole.shape[0]
    if "{e}" in names[0]:
        for expert in range(num_rows):
            part = whole.part(names[0].replace("{e}", str(expert)), expert, expert + 1)
            yield replace(part, shape=whole.shape[1:])
        return
    ends = list(accumulate(rows_of(names, num_rows, config), initial=0))
    if ends[-1] != num_rows:
        raise SpecError(f"tensor {whole.name} has {num_rows} rows, and its parts need {ends[-1]}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = heads if ARCHITECTURES[architecture].is_interleaved else {}
    for name, rows in zip(names, pairwise(ends), strict=True):
        yield replace(whole.part(name, *rows), interleaved_heads=heads.get(name.split(".")[-2], 0))


def _hugging_face_names(name: str, architecture: str) -> tuple[str, ...]:
    """Return the names of the matrices in the rows of a tensor. {e} stands for an expert's number."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        raise SpecError(
            f"tensor {name} scales another one, as in NVFP4 files: not supported; use a Q4_K_M or Q8_0 file"
        )
    if stem in _WHOLE:
        return (f"{_WHOLE[stem]}.{suffix}",)
    match stem.split("."):
        case ["blk", layer, role] if names := stored_names(architecture, role, suffix):
            return tuple(f"model.layers.{layer}.{inner}" for inner in names)
        # Early files of Mixtral have a tensor for each expert.
        case ["blk", layer, role, expert] if expert.isdecimal() and (
            names := stored_names(architecture, f"{role}_exps", suffix)
        ):
            return tuple(f"model.layers.{layer}.{inner.replace('{e}', expert)}" for inner in names)
    raise SpecError(f"tensor {name} does not belong to a model of architecture {architecture}")


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
