"""Supported quantization methods, and checks that reject other weight formats by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from core.types.errors import SpecError

QUANTIZATION_METHODS = (
    *("compressed-tensors", "modelopt", "fp8", "fbgemm_fp8", "mxfp4", "awq", "gptq", "auto-round", "bitsandbytes"),
    "quark",
)
INSTEAD = (
    "use the unquantized checkpoint, one in a format of compressed-tensors, AWQ, GPTQ or bitsandbytes, or a GGUF file "
    "(`cluster quantize` writes compressed-tensors)"
)

# Values of a key in quantization_config, or in the settings of its layers, by method.
_KNOWN: dict[str, tuple[str, tuple[object, ...]]] = {
    "awq": ("version", ("gemm", "gemv", "gemv_fast", "marlin")),
    "gptq": ("checkpoint_format", ("gptq", "gptq_v2")),
    "compressed-tensors": (
        "format",
        (
            *("dense", "mixed-precision", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
            *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
        ),
    ),
    "modelopt": (
        "quant_algo",
        (
            *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "W8A16", "W8A8_SQ_PER_CHANNEL", "W4A16_AWQ"),
            *("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "MIXED_PRECISION"),
        ),
    ),
    "quark": ("weight", ("fp8_e4m3", "int8", "fp4 e8m0")),
    "auto-round": ("data_type", ("int", "fp", "fp8", "mx_fp", "mx_fp4", "mx_fp8", "nv_fp", "nv_fp4")),
}

# Sizes of a block of weights with one scale.
_BLOCKS = ("weight_block_size", "block_structure", "group_size")

# Format by the last part of a tensor's name.
_UNSUPPORTED = {
    "weight_bitmask": "compressed-tensors sparse",
    "compressed": "compressed-tensors sparse",
    "svdquant_lora_a": "ModelOpt NVFP4_SVD",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "W_q": "HQQ",
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "B": "Marlin",
    "biases": "MLX",
    "lora_A": "LoRA",
}
_BY_KEY = {method.replace("-", "_"): method for method in QUANTIZATION_METHODS}
_OWN_NAMES = (".attention.wq.weight", ".attention.wq_a.weight")


def check_format(names: Collection[str], *, has_own_format: bool = False) -> None:
    """Raise SpecError that names the format and a tensor, if the weights are in an unsupported format.

    has_own_format: whether the settings, and so the tensors' names, are in Mistral's own format.
    """
    by_suffix: dict[str, str] = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        by_suffix.setdefault(suffix, name)
        by_suffix.setdefault(stem.rpartition(".")[2], name)  # adapters write X.suffix.weight
    for last, kind in _UNSUPPORTED.items():
        if last in by_suffix:
            raise SpecError(f"{by_suffix[last]}: {kind} is not supported; {INSTEAD}")
    if own := next((name for name in names if not has_own_format and name.endswith(_OWN_NAMES)), None):
        raise SpecError(
            f"{own}: tensors under Mistral's or Meta's own names are not supported beside config.json; use the "
            "repository's model*.safetensors, or Mistral's params.json without config.json"
        )


def with_usual_method(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return quantization_config with the usual name of its method; some files write compressed_tensors or GPTQ.

    An unknown method stays as it is.
    """
    method = config.get("quant_method")
    key = str(method).rpartition("/")[2].lower().replace("-", "_")  # intel/auto-round
    return {**config, "quant_method": _BY_KEY.get(key, method)} if method else dict(config)


def check_method(config: Mapping[str, Any]) -> None:
    """Raise SpecError if a quantization's settings are not supported. config: quantization_config; may be empty."""
    config = with_usual_method(config)
    method = config.get("quant_method")
    if config and method is None:
        method = "MLX" if {"group_size", "bits"} <= config.keys() else "an unnamed method"
    if config and method not in QUANTIZATION_METHODS:
        known = ", ".join(QUANTIZATION_METHODS)
        raise SpecError(f"weights quantized by {method} are not supported; supported: {known}; {INSTEAD}")
    if transforms := config.get("transform_config"):
        named = ", ".join(transforms.get("config_groups", transforms)) if isinstance(transforms, dict) else transforms
        raise SpecError(f"quantization_config.transform_config ({named}) rotates activations: not supported; {INSTEAD}")
    key, known_values = _KNOWN.get(str(method), ("", ()))
    layers = _layers(config)
    for settings in (config, *layers):
        found = settings.get(key)
        if found is not None and str(found).lower() not in [str(value).lower() for value in known_values]:
            supported = ", ".join(map(str, known_values))
            raise SpecError(f"{method} with {key} {found} is not supported; supported: {supported}; {INSTEAD}")
    schemes = [*layers, *(layer.get("weights") or {} for layer in layers)]
    for key, block in [(key, as_block(scheme.get(key))) for scheme in (config, *schemes) for key in _BLOCKS]:
        numbers = block if isinstance(block, list) else [block, 1]
        if block and not (len(numbers) == 2 and all(type(number) is int and number > 0 for number in numbers)):
            if (key, block) != ("group_size", -1):
                raise SpecError(f"quantization_config: {key} is {block!r}, and must be numbers above 0")


def as_block(found: Any) -> Any:
    """Return a block size as two numbers, outputs and inputs; early files of compressed-tensors write 128x128."""
    if isinstance(found, str) and re.fullmatch("[0-9]{1,9}x[0-9]{1,9}", found):
        return [int(number) for number in found.split("x")]
    return found


def _layers(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of groups of layers. Raises SpecError if they are not objects."""
    found: list[Mapping[str, Any]] = []
    every = {key: config.get(key) or {} for key in ("config_groups", "quantized_layers")}
    is_quark = config.get("quant_method") == "quark"
    if is_quark:
        every |= {key: config.get(key) or {} for key in ("layer_quant_config", "layer_type_quant_config")}
        every["global_quant_config"] = {"": config.get("global_quant_config") or {}}
    for key, groups in every.items():
        layers = list(groups.values()) if isinstance(groups, dict) else [groups]
        fitting = [
            layer for layer in layers if isinstance(layer, dict) and isinstance(layer.get("weights") or {}, dict)
        ]
        if not isinstance(groups, dict) or len(fitting) < len(layers):
            raise SpecError(
                f"quantization_config.{key} is {config[key]!r:.80}, and must hold objects; download config.json again"
            )
        found += [_of_quark(layer) for layer in fitting] if is_quark else fitting
    return found


def _of_quark(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the type of a layer's weights, and for 4-bit floats that of their scales."""
    weight = layer.get("weight") or {}
    if not isinstance(weight, dict):
        return {"weight": "in two stages"}
    dtype = weight.get("dtype")
    return {"weight": f"{dtype} {weight.get('scale_format')}" if dtype == "fp4" else dtype}
