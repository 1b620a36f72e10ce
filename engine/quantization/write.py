"""Writer of 8-bit checkpoints: quantizes the matrices of the layers and copies everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from core.model.gguf_table import TABLE
from core.types.errors import SpecError
from engine.kernels.quant.row_quantization import MOST
from engine.quantization.rounding import round_with_compensation
from engine.weights.checkpoint import Checkpoint
from engine.weights.open_checkpoint import open_checkpoint

# O outputs, I inputs

_BLOCK = 128
_FILE_BYTES = 4 << 30
_FP8_MOST = MOST[torch.float8_e4m3fn]
# Matrices of attention, MLPs and experts.
_MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")

# By suffix of the tensor name.
_Parts = dict[str, Tensor]


def fp8_parts(weight_OI: Tensor, gram_II: Tensor | None = None) -> _Parts:
    """Quantize to e4m3 with one fp32 scale per block of 128 x 128; blocks at the edges may be smaller.

    gram: Gram matrix of the inputs, see round_with_compensation; None rounds each number to nearest.
    """
    num_outputs, num_inputs = weight_OI.shape
    wide = pad(weight_OI.float(), (0, -num_inputs % _BLOCK, 0, -num_outputs % _BLOCK))
    blocks = torch.unflatten(torch.unflatten(wide, 0, (-1, _BLOCK)), 2, (-1, _BLOCK))
    scales = (blocks.abs().amax(dim=(1, 3)) / _FP8_MOST).clamp_min(2.0**-120)
    scales_OI = scales.repeat_interleave(_BLOCK, 0)[:num_outputs].repeat_interleave(_BLOCK, 1)[:, :num_inputs]
    if gram_II is not None:
        weight_OI = round_with_compensation(weight_OI, gram_II, lambda x_O, i: _to_fp8(x_O, scales_OI[:, i]))
    codes = (weight_OI.float() / scales_OI).clamp(-_FP8_MOST, _FP8_MOST)
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _to_fp8(x: Tensor, scales: Tensor) -> Tensor:
    return (x / scales).clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).float() * scales


def int8_parts(weight_OI: Tensor, gram_II: Tensor | None = None) -> _Parts:
    """Quantize to int8 with one fp32 scale per output, symmetric. gram: as for fp8_parts."""
    wide = weight_OI.float()
    scales_O1 = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp_min(2.0**-120)
    if gram_II is not None:
        scales_O = scales_O1.squeeze(1)
        wide = round_with_compensation(
            wide, gram_II, lambda x_O, i: (x_O / scales_O).round().clamp(-127, 127) * scales_O
        )
    return {"weight": (wide / scales_O1).round().to(torch.int8), "weight_scale": scales_O1}


_INT8_SCHEME = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_Quantize = Callable[[Tensor, Tensor | None], _Parts]
_FORMATS: dict[str, tuple[_Quantize, dict[str, Any]]] = {
    "fp8": (
        fp8_parts,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "int8": (
        int8_parts,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT8_SCHEME}},
        },
    ),
}


def quantize_checkpoint(
    model_dir: Path, into: Path, kind: str, *, grams: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Write a checkpoint of `kind` ("fp8" or "int8") in a public format, with tokenizer and configs.

    into: a new directory. grams: Gram matrices of inputs (calibration.inputs_of); matrices not in it are rounded to
    nearest. Holds one file's tensors in memory (up to 4 GiB). Raises SpecError.
    """
    if kind not in _FORMATS:
        raise SpecError(f"unknown quantization format {kind!r}; choose one of {', '.join(_FORMATS)}")
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        raise SpecError(f"{model_dir} is already quantized; use the unquantized checkpoint")
    try:
        into.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"{into} already exists") from None
    quantize, description = _FORMATS[kind]
    for file in model_dir.glob("*"):
        if file.is_file() and file.suffix not in (".safetensors", ".gguf") and ".index." not in file.name:
            if file.name not in (TABLE, "config.json"):
                shutil.copy(file, into)
    _write_tensors(open_checkpoint(model_dir), into, quantize, grams)
    (into / "config.json").write_text(
        json.dumps(config | {"quantization_config": description}, indent=2), encoding="utf-8"
    )


def _write_tensors(checkpoint: Checkpoint, into: Path, quantize: _Quantize, grams: Mapping[str, Tensor]) -> None:
    batch: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        save_file(batch, into / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(batch, name))
        batch.clear()

    for name in checkpoint.shapes:
        tensor = checkpoint.read(name)
        if ".layers." in name and name.endswith(_MATRICES):
            stem = name.removesuffix("weight")
            parts = quantize(tensor, grams.get(stem.removesuffix(".")))
            batch |= {stem + suffix: part.contiguous() for suffix, part in parts.items()}
        else:
            batch[name] = tensor.contiguous()
        if sum(part.nbytes for part in batch.values()) > _FILE_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": file_of}
    (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
