"""Generator of the files in this folder: one small matrix per format, packed and dequantized by the format's library.

    pip install --no-deps autoawq==0.2.9 auto-gptq==0.7.1 compressed-tensors==0.20.0 loguru
    python tests/engine/weights/formats/make.py

Each file holds the tensors as in a checkpoint, under `w.`; the library's dequantized `numbers` (O, I) fp32; and the
checkpoint's quantization_config in its metadata. Tests read only the files and need none of these packages.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUTPUTS, INPUTS, GROUP = 64, 96, 32
HERE = Path(__file__).parent


def module(name: str) -> Any:
    """Import a module without running the __init__ of its packages, which would import far more."""
    parts = name.split(".")
    root = PathFinder.find_spec(parts[0])
    assert root is not None and root.submodule_search_locations
    for depth in range(1, len(parts)):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(Path(root.submodule_search_locations[0], *parts[1:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def matrix() -> nn.Linear:
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    return linear


def asymmetric(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return 4-bit scales and zeros (O, G) of consecutive groups."""
    groups = weight_OI.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def write(name: str, tensors: dict[str, Tensor], numbers: Tensor, config: dict[str, Any]) -> None:
    stored = {f"w.{key}": value.contiguous() for key, value in tensors.items()}
    stored["numbers"] = numbers.float().contiguous()
    save_file(stored, HERE / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})


def awq() -> None:
    sys.modules["awq.utils.module"] = ModuleType("awq.utils.module")
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")  # type: ignore[attr-defined]
    gemm = module("awq.modules.linear.gemm")
    linear = matrix()
    scales, zeros = asymmetric(linear.weight.data)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T).state_dict()
    widen = module("awq.utils.packing_utils").dequantize_gemm
    numbers = widen(packed["qweight"], packed["qzeros"], packed["scales"].float(), 4, GROUP).T
    write("awq", packed, numbers, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"})


def gptq() -> None:
    linear_of = module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    linear = matrix()
    # As with desc_act.
    group = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1)) // GROUP
    order = group.argsort(stable=True)
    scales, zeros = asymmetric(linear.weight.data[:, order])
    packed = linear_of(4, GROUP, INPUTS, OUTPUTS, bias=False)
    packed.pack(linear, scales, zeros, g_idx=group.int())
    numbers = packed(torch.eye(INPUTS)).T
    tensors = packed.state_dict()
    tensors["scales"] = tensors["scales"].half()
    write("gptq", tensors, numbers, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True})


def compressed(name: str, **weights: Any) -> None:
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors.naive_quantized.base")
    weights |= {"symmetric": True, "num_bits": 8}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    height, width = weights.get("block_structure") or (1, weights.get("group_size") or INPUTS)
    weight = matrix().weight.data
    blocks = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    largest = 448 if weights["type"] == "float" else 127
    parts = {"weight": weight, "weight_scale": blocks.abs().amax(dim=(1, 3)) / largest}
    compressor = compressors.NaiveQuantizationCompressor
    packed = compressor.compress(parts, scheme)
    form = "float-quantized" if weights["type"] == "float" else "int-quantized"
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    write(name, packed, compressor.decompress(packed, scheme)["weight"], config)


if __name__ == "__main__":
    awq()
    gptq()
    compressed("fp8_channels", type="float", strategy="channel")
    compressed("fp8_blocks", type="float", strategy="block", block_structure=[32, 48])
    compressed("int8_channels", type="int", strategy="channel")
    compressed("int8_groups", type="int", strategy="group", group_size=GROUP)
