"""Generator of the files in this folder: one small matrix per format, packed and dequantized by the format's library.

    pip install --no-deps autoawq==0.2.9 auto-gptq==0.7.1 gptqmodel==7.7.0 auto-round==0.16.1 bitsandbytes==0.50.2 \
        compressed-tensors==0.20.0 loguru nvidia-modelopt==0.47.0 omegaconf py-cpuinfo
    python -m tests.engine.weights.formats.make

Each file holds the tensors as in a checkpoint, under `w.`; the library's dequantized `numbers` (O, I) fp32; and the
checkpoint's quantization_config in its metadata. Tests read only the files and need none of these packages.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUTPUTS, INPUTS, GROUP = 64, 96, 32
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Written:
    """Tensors of one matrix under their checkpoint names, the library's numbers, and the quantization_config."""

    tensors: dict[str, Tensor]
    numbers: Tensor
    config: dict[str, Any]

    def save(self, path: Path) -> None:
        stored = {name: value.contiguous() for name, value in self.tensors.items()}
        stored["numbers"] = self.numbers.float().contiguous()
        save_file(stored, path, metadata={"quantization_config": json.dumps(self.config)})


def module(name: str) -> Any:
    """Import a module without running the __init__ of its packages, which would import far more."""
    parts = name.split(".")
    root = PathFinder.find_spec(parts[0])
    if root is None or not root.submodule_search_locations:
        raise ModuleNotFoundError(f"no module named {parts[0]!r}", name=parts[0])
    for depth in range(1, len(parts)):
        package = ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(Path(root.submodule_search_locations[0], *parts[1:depth]))]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(name)


def linear(inputs: int = INPUTS) -> nn.Linear:
    layer = nn.Linear(inputs, OUTPUTS, bias=False)
    layer.weight.data = torch.randn(OUTPUTS, inputs, generator=torch.Generator().manual_seed(0))
    return layer


def asymmetric(weight_OI: Tensor, bits: int = 4) -> tuple[Tensor, Tensor]:
    """Return scales and zeros (O, G) of consecutive groups."""
    groups, most = weight_OI.unflatten(1, (-1, GROUP)), (1 << bits) - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    return scales, (-low / scales).round().clamp(1, most)


def under_w(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"w.{name}": tensor for name, tensor in tensors.items()}


def grouped(codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return (codes - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)


# ---- AutoAWQ ----


def awq(version: str) -> Written:
    sys.modules["awq.utils.module"] = ModuleType("awq.utils.module")
    sys.modules["awq.utils.module"].try_import = lambda name: (None, "")  # type: ignore[attr-defined]
    kind = module(f"awq.modules.linear.{version}")
    layer = linear(INPUTS if version == "gemm" else 128)
    scales, zeros = asymmetric(layer.weight.data)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": version}
    if version == "gemm":
        packed = kind.WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales.T, zeros=zeros.T).state_dict()
        widen = module("awq.utils.packing_utils").dequantize_gemm
        numbers = widen(packed["qweight"], packed["qzeros"], packed["scales"].float(), 4, GROUP).T
        return Written(under_w(packed), numbers, config)
    # The library multiplies these versions on GPUs only: numbers are the codes that it packed.
    if version == "marlin":
        scales = (layer.weight.data.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).half().float()
        zeros = torch.full_like(scales, 8)
        codes = (layer.weight.data / scales.repeat_interleave(GROUP, 1)).round() + 8
        packed = kind.WQLinear_Marlin.from_linear(layer, 4, GROUP, scales=scales.half()).state_dict()
    else:
        name = {"gemv": "WQLinear_GEMV", "gemv_fast": "WQLinear_GEMVFast"}[version]
        codes = (layer.weight.data / scales.repeat_interleave(GROUP, 1) + zeros.repeat_interleave(GROUP, 1)).round()
        packed = getattr(kind, name).from_linear(layer, 4, GROUP, scales=scales, zeros=zeros).state_dict()
    return Written(under_w(packed), grouped(codes.clamp(0, 15), zeros, scales), config)


# ---- AutoGPTQ and auto-round ----


def gptq(bits: int) -> Written:
    linear_of = module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    layer = linear()
    # As with desc_act.
    group = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1)) // GROUP
    order = group.argsort(stable=True)
    scales, zeros = asymmetric(layer.weight.data[:, order], bits)
    packed = linear_of(bits, GROUP, INPUTS, OUTPUTS, bias=False)
    packed.pack(layer, scales, zeros.clone(), g_idx=group.int())
    numbers = packed(torch.eye(INPUTS)).T
    tensors = packed.state_dict()
    tensors["scales"] = tensors["scales"].half()
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": True}
    return Written(under_w(tensors), numbers, config)


def gptqmodel(bits: int, form: str) -> Written:
    """Write with the newest GPTQ library, without symmetry; in version 1 a zero of 0 borrows from the next."""
    kinds, config = importlib.import_module("gptqmodel.nn_modules.qlinear.torch"), importlib.import_module("gptqmodel")
    layer = linear()
    layer.weight.data[::3] = layer.weight.data[::3].abs()
    groups = layer.weight.data.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round()
    packed = kinds.TorchLinear(bits, GROUP, False, False, INPUTS, OUTPUTS, bias=False)
    packed.pack_original(layer, scales, zeros, torch.arange(INPUTS).int() // GROUP)
    packed.post_init()
    packed.scales = packed.scales.float()
    numbers = packed.dequantize_weight().T
    packed.scales = packed.scales.half()
    if form == "gptq":
        settings = config.QuantizeConfig(bits=bits, group_size=GROUP, sym=False, desc_act=False)
        importlib.import_module("gptqmodel.utils.model").convert_gptq_v2_to_v1_format_module(packed, settings)
    tensors = {name: packed.state_dict()[name] for name in ("qweight", "qzeros", "scales", "g_idx")}
    description = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, "checkpoint_format": form}
    return Written(under_w(tensors), numbers, description)


def gptqmodel_fp8() -> Written:
    """Write FP8 whose stored scales divide."""
    kinds = importlib.import_module("gptqmodel.nn_modules.qlinear.fp8")
    codes, scales = kinds.quantize_fp8_weight(linear().weight.data, weight_scale_method="row")
    numbers = kinds.dequantize_fp8(codes, scale_inv=scales, axis=0, target_dtype=torch.float32)
    config = {"quant_method": "fp8", "weight_scale_method": "row", "weight_scale_semantics": "inverse"}
    return Written(under_w({"weight": codes, "weight_scale_inv": scales}), numbers, config)


def auto_round(packing: str, bits: int) -> Written:
    name = "qlinear_torch_zp" if packing == "auto_round:auto_gptq" else "qlinear_torch"
    linear_of = importlib.import_module(f"auto_round_extension.torch.{name}").QuantLinear
    layer = linear()
    scales, zeros = asymmetric(layer.weight.data, bits)
    packed = linear_of(bits, GROUP, INPUTS, OUTPUTS, bias=False)
    packed.pack(layer, scales, zeros.clone(), device="cpu")
    tensors = packed.state_dict()
    packed.scales = packed.scales.float()
    numbers = packed(torch.eye(INPUTS)).T
    config = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "packing_format": packing}
    return Written(under_w(tensors), numbers, config)


# ---- compressed-tensors ----


def compressed(form: str, **settings: Any) -> Written:
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressor = importlib.import_module("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(form)
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    weights: dict[str, Any] = {"symmetric": True, "num_bits": 8, "type": "int", "strategy": "group"} | settings
    arguments = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    height, width = weights.get("block_structure") or (1, weights.get("group_size") or INPUTS)
    height = OUTPUTS if weights["strategy"] == "tensor" else height
    weight = linear().weight.data
    blocks = weight.unflatten(0, (-1, height)).unflatten(2, (-1, width))
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    bits = weights["num_bits"]
    parts = {"weight": weight, "weight_scale": torch.maximum(-low, high)}
    if weights["type"] == "float":
        parts["weight_scale"] /= 6 if bits == 4 else 448
    elif weights["symmetric"]:
        parts["weight_scale"] /= 2 ** (bits - 1) - 0.5
    else:
        parts["weight_scale"] = (high - low) / (2**bits - 1)
        zero = (-(2 ** (bits - 1)) - low / parts["weight_scale"]).round()
        parts["weight_zero_point"] = zero.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    if form.startswith("nvfp4"):
        parts["weight_global_scale"] = 6 * 448 / weight.abs().amax().view(1)
        parts["weight_scale"] = (parts["weight_scale"] * parts["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    if form.startswith("mx"):
        parts["weight_scale"] = 2 ** parts["weight_scale"].log2().ceil()
    packed = compressor.compress(parts, scheme)
    if bits == 4 and weights["type"] == "float":
        # Its decompress() rounds to bfloat16.
        codes = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers").unpack_fp4_from_uint8(
            packed["weight_packed"], *weight.shape, dtype=torch.float32
        )
        scale, factor = parts["weight_scale"], parts.get("weight_global_scale")
        numbers = forward.dequantize(codes, scale, args=arguments, global_scale=factor, dtype=torch.float32)
    else:
        numbers = compressor.decompress(packed, scheme)["weight"]
    group = {"targets": ["Linear"], "format": form, "weights": json.loads(arguments.model_dump_json(exclude_none=True))}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Written(under_w(packed), numbers, config)


# ---- ModelOpt ----


def modelopt(algorithm: str) -> Written:
    kinds = importlib.import_module("modelopt.torch.quantization.qtensor")
    weight = linear().weight.data
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": algorithm}
    if algorithm == "NVFP4":
        codes, scale, scale_2 = kinds.NVFP4QTensor.quantize(weight, 16)
        numbers = codes.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        parts = {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    elif algorithm == "MXFP8":
        codes, scale = kinds.MXFP8QTensor.quantize(weight)
        numbers = codes.dequantize(torch.float32, scale=scale)
        parts = {"weight": codes._quantized_data, "weight_scale": scale}
    else:
        export = importlib.import_module("modelopt.torch.export.quant_utils")
        scale = weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7
        smooth = torch.rand(INPUTS, generator=torch.Generator().manual_seed(2)) + 0.5
        parts = {"weight": export.to_quantized_weight(weight, scale, "int4_awq", block_size=GROUP)}
        parts |= {"weight_scale": scale, "pre_quant_scale": smooth}
        scales = scale.repeat_interleave(GROUP, 1)
        numbers = (weight / scales).round().clamp(-8, 7) * scales * smooth
        config |= {"group_size": GROUP, "has_zero_point": False, "pre_quant_scale": True}
    return Written(under_w(parts), numbers, config)


# ---- bitsandbytes ----


def bitsandbytes(kind: str, is_nested: bool = False) -> Written:
    functional = importlib.import_module("bitsandbytes.functional")
    weight, config = linear().weight.data, {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8"}
    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        numbers = functional.int8_vectorwise_dequant(codes, scales)
        return Written(
            under_w({"weight": codes, "SCB": scales, "weight_format": torch.tensor(0).byte()}), numbers, config
        )
    # Rows as wide as a block: the library widens rows of other widths wrongly on CPUs.
    codes, state = functional.quantize_4bit(
        weight.view(-1, 64), quant_type=kind, compress_statistics=is_nested, blocksize=64
    )
    numbers = functional.dequantize_4bit(codes, state).view(weight.shape)
    state.shape = weight.shape
    parts = {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return Written(under_w(parts), numbers, config | {"load_in_4bit": True, "bnb_4bit_quant_type": kind})


# ---- transformers ----


def mxfp4_experts() -> Written:
    """Write two experts in gpt-oss' layout; numbers: (2 O, I), one below the other."""
    convert = importlib.import_module("transformers.integrations.mxfp4")._convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, OUTPUTS, INPUTS // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(115, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)
    bias = torch.randn(2, OUTPUTS, generator=generator)
    parts = {"w_blocks": blocks, "w_scales": scales, "w_bias": bias}
    numbers = convert(blocks, scales, dtype=torch.float32).transpose(1, 2).flatten(0, 1)
    return Written({f"experts.{name}": part for name, part in parts.items()}, numbers, {"quant_method": "mxfp4"})


def fp8_blocks() -> Written:
    """Write blocks with scales in powers of two, as bytes."""
    integration = importlib.import_module("transformers.integrations.finegrained_fp8")
    weight = linear().weight.data
    scales = 2 ** (weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 48)).abs().amax(dim=(1, 3)) / 448).log2().ceil()
    codes = (weight / scales.repeat_interleave(32, 0).repeat_interleave(48, 1)).to(torch.float8_e4m3fn)
    numbers = integration.Fp8Dequantize(None)._dequantize_one(codes, scales)
    config = {"quant_method": "fp8", "weight_block_size": [32, 48], "scale_fmt": "ue8m0"}
    return Written(under_w({"weight": codes, "scale": scales.to(torch.float8_e8m0fnu)}), numbers, config)


MAKERS: dict[str, Callable[[], Written]] = {
    **{f"awq_{version}": partial(awq, version) for version in ("gemm", "gemv", "gemv_fast", "marlin")},
    **{f"gptq_{bits}": partial(gptq, bits) for bits in (2, 3, 4, 8)},
    "gptqmodel_4_v2": partial(gptqmodel, 4, "gptq_v2"),
    **{f"gptqmodel_{bits}": partial(gptqmodel, bits, "gptq") for bits in (3, 4)},
    "gptqmodel_fp8": gptqmodel_fp8,
    "auto_round": partial(auto_round, "auto_round:auto_gptq", 4),
    "auto_round_5": partial(auto_round, "auto_round", 5),
    **{f"int{bits}_pack": partial(compressed, "pack-quantized", num_bits=bits, group_size=GROUP) for bits in (2, 4, 7)},
    "int3_pack_channels": partial(compressed, "pack-quantized", num_bits=3, strategy="channel"),
    **{
        f"int{bits}_pack_zeros": partial(compressed, "pack-quantized", num_bits=bits, group_size=GROUP, symmetric=False)
        for bits in (4, 5, 8)
    },
    "fp8_tensor": partial(compressed, "float-quantized", type="float", strategy="tensor"),
    "fp8_channels": partial(compressed, "float-quantized", type="float", strategy="channel"),
    "fp8_blocks": partial(compressed, "float-quantized", type="float", strategy="block", block_structure=[32, 48]),
    "fp8_blocks_e8m0": fp8_blocks,
    "int8_channels": partial(compressed, "int-quantized", strategy="channel"),
    "int8_groups": partial(compressed, "int-quantized", group_size=GROUP),
    "nvfp4": partial(
        compressed, "nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16
    ),
    "mxfp4": partial(compressed, "mxfp4-pack-quantized", type="float", num_bits=4, group_size=32),
    "mxfp8": partial(compressed, "mxfp8-quantized", type="float", group_size=32, scale_dtype=torch.uint8),
    "mxfp4_experts": mxfp4_experts,
    **{f"modelopt_{algorithm.lower()}": partial(modelopt, algorithm) for algorithm in ("NVFP4", "MXFP8", "W4A16_AWQ")},
    **{f"bnb_{kind}": partial(bitsandbytes, kind) for kind in ("nf4", "fp4", "int8")},
    "bnb_nf4_nested": partial(bitsandbytes, "nf4", is_nested=True),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        MAKERS[name]().save(HERE / f"{name}.safetensors")
        print(name, flush=True)
