"""Weight formats that are recognized by their tensor names and rejected by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from core.types.errors import SpecError

QUANTIZATION_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "modelopt")
INSTEAD = (
    "use the unquantized checkpoint, one in FP8, INT8, MXFP8, AWQ or GPTQ, or a GGUF file (`cluster quantize` writes "
    "FP8 and INT8)"
)

# Format by the last part of a tensor's name.
_UNSUPPORTED = {
    "weight_scale_2": "NVFP4 (ModelOpt)",
    "weight_bitmask": "compressed-tensors sparse",
    "compressed": "compressed-tensors sparse",
    "pre_quant_scale": "ModelOpt AWQ",
    "absmax": "bitsandbytes 4-bit",
    "SCB": "bitsandbytes 8-bit",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "W_q": "HQQ",
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "B": "Marlin",
    "biases": "MLX",
    "gate_up_proj_blocks": "MXFP4 (gpt-oss)",
    "down_proj_blocks": "MXFP4 (gpt-oss)",
    "lora_A": "LoRA",
}
_NATIVE = ".attention.wq.weight"


def check_format(names: Collection[str], config: Mapping[str, Any]) -> None:
    """Raise SpecError that names the format and a tensor, if the weights are in an unsupported format.

    config: quantization settings of the checkpoint, or an empty mapping.
    """
    by_suffix: dict[str, str] = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        by_suffix.setdefault(suffix, name)
        by_suffix.setdefault(stem.rpartition(".")[2], name)  # adapters and some quantizers write X.suffix.weight
    if (packed := by_suffix.get("weight_packed")) is not None:
        raise SpecError(f"{packed}: {_packed_format(by_suffix)} is not supported; {INSTEAD}")
    for last, kind in _UNSUPPORTED.items():
        if last in by_suffix:
            raise SpecError(f"{by_suffix[last]}: {kind} is not supported; {INSTEAD}")
    if native := next((name for name in names if name.endswith(_NATIVE)), None):
        raise SpecError(
            f"{native}: tensors under Mistral's or Meta's own names are not supported; use the repository's "
            "model*.safetensors, or write them with transformers' conversion script of the model"
        )


def check_method(config: Mapping[str, Any]) -> None:
    """Raise SpecError if config.json names a quantization that is not supported. config: as for check_format."""
    method = config.get("quant_method")
    if config and method is None:
        method = "MLX" if {"group_size", "bits"} <= config.keys() else "an unnamed method"
    if config and method not in QUANTIZATION_METHODS:
        known = ", ".join(QUANTIZATION_METHODS)
        raise SpecError(f"weights quantised by {method} are not supported; supported: {known}; {INSTEAD}")
    if transforms := config.get("transform_config"):
        named = ", ".join(transforms.get("config_groups", transforms))
        raise SpecError(f"quantization_config.transform_config ({named}) rotates activations: not supported; {INSTEAD}")


def _packed_format(by_suffix: Mapping[str, str]) -> str:
    if "weight_global_scale" in by_suffix:
        return "NVFP4 (compressed-tensors nvfp4-pack-quantized)"
    return f"compressed-tensors {'pack-quantized' if 'weight_shape' in by_suffix else 'mxfp4-pack-quantized'}"
