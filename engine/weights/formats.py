"""Table of the published formats of quantized matrices: the tensors of each, and how numbers lie in them.

weight[o, i] = (level(code[o, i]) - zero[o, g]) * scale[o, g] * factor * column[i] with g = group[i].
`activations_of` names the dtype of inputs that a format asks for; each device decides whether its products use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.model.weight_formats import INSTEAD, as_block
from core.types.errors import SpecError
from engine.weights.checkpoint import FLOATS
from engine.weights.quantized_weight import AWQ_ORDER, E2M1_LEVELS, fast_codes, fast_zeros, marlin_codes, marlin_scales

_DTYPES = {
    "float": FLOATS,
    "scale": (*FLOATS, "F8_E8M0", "U8"),
    "e4m3": ("F8_E4M3",),
    "e8m0": ("F8_E8M0", "U8"),
    "eight": ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"),
    "number": (*FLOATS, "F8_E4M3", "I8"),
    "any": (*FLOATS, "U8"),
    "byte": ("U8",),
    "int8": ("I8",),
    "int16": ("I16",),
    "int32": ("I32",),
}
# Tensors beside those of the table: the shape, a factor of each input, the group of each input.
SHAPE, COLUMNS, ORDERS = ".weight_shape", ".pre_quant_scale", (".g_idx", ".weight_g_idx")
# bitsandbytes: layout of INT8 (0: row by row); settings, levels, and the scales' scales and levels of 4 bits.
LAYOUT, STATES = ".weight_format", tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
LEVELS, NESTED, NESTED_LEVELS = (f".weight.{name}" for name in ("quant_map", "nested_absmax", "nested_quant_map"))
COMPANIONS = (SHAPE, COLUMNS, *ORDERS, LAYOUT, *STATES, LEVELS, NESTED, NESTED_LEVELS)
_SCALES_OF_FLOATS = (".weight_scale", ".weight_scale_inv", ".qscale_weight")


@dataclass(frozen=True)
class Part:
    """Tensor of a format: the end of its name, its possible dtypes, and its dimensions in stored order.

    O outputs, I inputs, G groups of inputs, E experts. A slash marks the dimension along which numbers are packed.
    """

    name: str
    dtypes: tuple[str, ...]
    dims: tuple[str, ...]

    @classmethod
    def of(cls, words: str) -> Part:
        name, dtype, *dims = words.split()
        return cls(name, _DTYPES[dtype], tuple(dims))


@dataclass(frozen=True)
class StoredFormat:
    """Row of FORMATS.

    kind: required result of kind_of(config); empty: the tensors' names identify the format. bits: per code; 0: found
    from the shapes. group: inputs per scale; 0: found from shapes and settings. levels: number of each code; None: the
    code itself. is_signed: codes are in two's complement. is_less_one: zeros are stored less one. order: index in its
    word of the code at each place. factor: suffix of the tensor with a factor of all weights; divides: the factor
    divides. constant: multiplies all scales. codes_of, scales_of: convert tensors to (O, I) codes and (G, O) scales;
    zeros_of: converts stored zeros, given the scales, to codes.
    """

    codes: Part
    scales: Part
    zeros: Part | None
    kind: str = ""
    bits: int = 8
    group: int = 0
    levels: tuple[float, ...] | None = None
    is_signed: bool = False
    is_less_one: bool = False
    order: tuple[int, ...] | None = None
    factor: str = ""
    divides: bool = False
    constant: float = 1.0
    codes_of: Callable[[Tensor], Tensor] | None = None
    scales_of: Callable[[Tensor], Tensor] | None = None
    zeros_of: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def has_middle(self) -> bool:
        """True if the code 2 ** (bits - 1) means 0 where no zeros are stored."""
        return self.levels is None and self.codes.dims != ("O", "I")


def _row(codes: str, scales: str, zeros: str = "", **rest: Any) -> StoredFormat:
    return StoredFormat(Part.of(codes), Part.of(scales), Part.of(zeros) if zeros else None, **rest)


_NVFP4: dict[str, Any] = {"bits": 4, "group": 16, "levels": E2M1_LEVELS}
_MXFP4: dict[str, Any] = {"bits": 4, "group": 32, "levels": E2M1_LEVELS}

# fmt: off
FORMATS = (
    # compressed-tensors: pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized
    _row(".weight_packed int32 O I/", ".weight_scale float O G", ".weight_zero_point int32 O/ G", bits=0),
    _row(".weight_packed byte O I/", ".weight_scale e4m3 O G", factor=".weight_global_scale", divides=True, **_NVFP4),
    _row(".weight_packed byte O I/", ".weight_scale e8m0 O G", **_MXFP4),
    # ModelOpt: NVFP4, MXFP4 (AMD Quark's as well), W4A16_AWQ
    _row(".weight byte O I/", ".weight_scale e4m3 O G", factor=".weight_scale_2", **_NVFP4),
    _row(".weight byte O I/", ".weight_scale e8m0 O G", **_MXFP4),
    _row(".weight byte O/ I", ".weight_scale float O G", bits=4, is_signed=True),
    # MXFP4 of OpenAI, fused over experts, and of DeepSeek
    _row("_blocks byte E O I/", "_scales e8m0 E O G", **_MXFP4),
    _row(".weight int8 O I/", ".scale e8m0 O G", **_MXFP4),
    # FP8, INT8 and MXFP8 of compressed-tensors, ModelOpt, FBGEMM and DeepSeek, also in blocks of outputs and inputs
    _row(".weight eight O I", ".weight_scale scale O G", ".weight_zero_point number O G"),
    _row(".weight eight O I", ".weight_scale_inv scale O G", ".weight_zero_point number O G"),
    _row(".weight eight O I", ".scale scale O G"),
    # FP8 of Mistral's own format
    _row(".weight e4m3 O I", ".qscale_weight float O G"),
    # bitsandbytes: INT8; NF4 and FP4, whose settings are a JSON tensor
    _row(".weight int8 O I", ".SCB float O G", constant=1 / 127),
    _row(".weight any flat", ".weight.absmax scale flat", bits=4),
    # AutoAWQ, by `version`
    _row(".qweight int32 I O/", ".scales float G O", ".qzeros int32 G O/", kind="gemm", bits=4, order=AWQ_ORDER),
    _row(".qweight int32 O I/", ".scales float O G", ".qzeros int32 O G/", kind="gemv", bits=4),
    _row(".qweight int16 tiles", ".scales float G O", ".qzeros float G O", kind="gemv_fast", bits=4,
         codes_of=fast_codes, zeros_of=fast_zeros),
    _row(".qweight int32 tiles", ".scales float G O", kind="marlin", bits=4,
         codes_of=marlin_codes, scales_of=marlin_scales),
    # AutoGPTQ, GPTQModel, auto-round: version 1 stores zeros less one
    _row(".qweight int32 I/ O", ".scales float G O", ".qzeros int32 G O/", kind="gptq", bits=0, is_less_one=True),
    _row(".qweight int32 I/ O", ".scales float G O", ".qzeros int32 G O/", kind="gptq_v2", bits=0),
)
# fmt: on


def stored_format(stem: str, end: str, dtypes: Mapping[str, str], kind: str) -> StoredFormat | None:
    """Return the format of the matrix with codes `stem + end`; None for plain floats. Raises SpecError.

    dtypes: safetensors dtype of every tensor, by name. kind: result of kind_of for the checkpoint's settings.
    """
    name = stem + end
    for row in FORMATS:
        if (
            row.codes.name == end
            and dtypes[name] in row.codes.dtypes
            and dtypes.get(stem + row.scales.name) in row.scales.dtypes
            and row.kind in ("", kind)
            and (not row.factor or stem + row.factor in dtypes)
        ):
            return row
    known = {row.scales.name for row in FORMATS if row.codes.name == end}
    beside = [f"{stem}{scales} ({dtypes[stem + scales]})" for scales in sorted(known) if stem + scales in dtypes]
    if dtypes[name] in FLOATS and end == ".weight" and not any(stem + scale in dtypes for scale in _SCALES_OF_FLOATS):
        return None
    found = f"with {', '.join(beside)} is in no supported format" if beside else "has no scales beside it"
    raise SpecError(f"{name} ({dtypes[name]}) {found}; {INSTEAD}")


def kind_of(config: Mapping[str, Any]) -> str:
    """Return the layout of `qweight` tensors, as in StoredFormat.kind; empty for methods that have none.

    config: quantization_config of config.json.
    """
    method, packing = str(config.get("quant_method")), str(config.get("packing_format") or config.get("backend") or "")
    if method == "awq":
        return str(config.get("version") or "gemm").lower()
    if method == "gptq":
        return str(config.get("checkpoint_format") or "gptq").lower()
    if method != "auto-round":
        return ""
    if "awq" in packing:
        return "gemm"
    # auto-round's other backends store zeros as they are.
    return "gptq" if "gptq" in packing and "gptqmodel" not in packing else "gptq_v2"


def activations_of(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype to which all products should quantize inputs; None: they should not, or settings differ."""
    groups = (config.get("config_groups") or {}).values()
    schemes = [group.get("input_activations") or {} for group in groups]
    kinds = {(scheme.get("type"), scheme.get("num_bits")) for scheme in schemes}
    if config.get("quant_method") == "fbgemm_fp8" or config.get("quant_algo") == "FP8":
        kinds = {("float", 8)}
    if kinds == {("int", 8)}:
        return torch.int8
    return torch.float8_e4m3fn if kinds == {("float", 8)} else None


@dataclass(frozen=True)
class Declared:
    """Settings of the weights in quantization_config.

    sizes: blocks of outputs and inputs that share a scale; 0: all of them. has_all_sizes: every scheme names its sizes.
    bits: of integer codes; may be empty. is_asymmetric: all schemes have zero points. is_symmetric: zero points are
    all in the middle of the codes. has_order: groups come in an order that the file gives.
    """

    sizes: tuple[tuple[int, int], ...]
    has_all_sizes: bool
    bits: frozenset[int]
    is_asymmetric: bool
    is_symmetric: bool
    has_order: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Declared:
        schemes = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
        schemes += (config.get("quantized_layers") or {}).values()
        # Layers with settings of their own; those that they leave out are the model's.
        named = [of for key in ("dynamic", "extra_config") if isinstance(of := config.get(key), dict)]
        changed = [settings for of in named for settings in of.values() if isinstance(settings, dict)]
        every = [config, *schemes, *changed]
        own = [_size(scheme) for scheme in schemes] or [_size(config)]
        bits = [scheme.get(key) for scheme in every for key in ("bits", "num_bits")]
        return cls(
            tuple(dict.fromkeys(size for scheme in every if (size := _size(scheme)))),
            all(own),
            frozenset(number for number in bits if type(number) is int),
            bool(schemes) and all(scheme.get("symmetric") is False for scheme in schemes),
            config.get("sym") is True and all(settings.get("sym", True) is True for settings in changed),
            bool(config.get("desc_act")) or any(scheme.get("actorder") == "group" for scheme in schemes),
        )


def _size(scheme: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the block of outputs and inputs with one scale, if the settings name it."""
    if scheme.get("quant_algo") == "MXFP8":
        return (1, 32)
    group, strategy = scheme.get("group_size"), scheme.get("strategy") or scheme.get("weight_scale_method")
    block = scheme.get("weight_block_size") or as_block(scheme.get("block_structure")) or group
    if block and isinstance(block, list):
        return (block[0], block[1])
    if type(group) is int and group > 0:
        return (1, group)
    if strategy == "tensor":
        return (0, 0)
    return (1, 0) if group == -1 or strategy == "channel" else None
