"""Random matrices in every low-bit format of the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from core.model.gguf_file import GGML_TYPES
from engine.cpu.structs import FormatName
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight, pack_4_bits
from tests.engine.gguf_files import random_blocks

OF_GGUF = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
Make = Callable[[int, int], GroupedWeight]
_E2M1 = torch.tensor(E2M1_LEVELS)
# bitsandbytes' tables.
_NF4_BELOW = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004)
_NF4_ABOVE = (0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)
_NF4 = torch.tensor((*_NF4_BELOW, 0.0, *_NF4_ABOVE))
_FP4 = torch.tensor([0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
_FP4 = torch.cat((_FP4, -_FP4))


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def _integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def _exponents(num_outputs: int, num_groups: int) -> Tensor:
    return _integers(120, 128, num_outputs, num_groups, seed=1).to(torch.uint8).view(torch.float8_e8m0fnu)


def _nibbles(
    size: int,
    scales: Callable[[int, int], Tensor],
    *,
    zeros: tuple[int, int] | None = None,
    levels: Tensor | None = None,
    has_factors: bool = False,
) -> Make:
    """Return a maker of 4-bit matrices with groups of `size`; 0: one group."""

    def make(num_outputs: int, num_inputs: int) -> GroupedWeight:
        group_I = torch.arange(num_inputs) // (size or num_inputs)
        num_groups = int(group_I[-1]) + 1
        codes = _integers(0, 16, num_outputs, num_inputs, seed=0)
        zeros_OG = None if zeros is None else _integers(*zeros, num_outputs, num_groups, seed=2).float()
        factors_O = _numbers(num_outputs, seed=3) * 0.01 if has_factors else None
        scales_OG = scales(num_outputs, num_groups)
        return GroupedWeight(pack_4_bits(codes), scales_OG, zeros_OG, group_I, levels, factors_O)

    return make


def _bytes(size: int, codes: Callable[[int, int], Tensor], scales: Callable[[int, int], Tensor]) -> Make:
    def make(num_outputs: int, num_inputs: int) -> GroupedWeight:
        group_I = torch.arange(num_inputs) // (size or num_inputs)
        return GroupedWeight(codes(num_outputs, num_inputs), scales(num_outputs, int(group_I[-1]) + 1), None, group_I)

    return make


def _act_order(num_outputs: int, num_inputs: int) -> GroupedWeight:
    """Return a matrix whose groups are in any order and of unequal sizes, as in one rank's columns."""
    weight = _nibbles(64, _half, zeros=(0, 17))(num_outputs, num_inputs)
    return replace(weight, group_I=_integers(0, num_inputs // 64, num_inputs, seed=5))


def _half(num_outputs: int, num_groups: int) -> Tensor:
    return _numbers(num_outputs, num_groups, seed=1).half()


def _single(num_outputs: int, num_groups: int) -> Tensor:
    return _numbers(num_outputs, num_groups, seed=1)


def _e4m3(num_outputs: int, num_groups: int) -> Tensor:
    return _numbers(num_outputs, num_groups, seed=1).to(torch.float8_e4m3fn)


def _signed(num_outputs: int, num_inputs: int) -> Tensor:
    return _integers(-128, 128, num_outputs, num_inputs, seed=0).to(torch.int8)


def _every_float(num_outputs: int, num_inputs: int) -> Tensor:
    """Return all 8-bit floats but NaN, including those below the normal range."""
    codes = _integers(0, 127, num_outputs, num_inputs, seed=0) + 128 * _integers(0, 2, num_outputs, num_inputs, seed=4)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


_MADE: dict[str, tuple[FormatName, Make]] = {
    "awq_128": (FormatName.INT4, _nibbles(128, _half, zeros=(0, 17))),
    "awq_32": (FormatName.INT4, _nibbles(32, _half, zeros=(0, 17))),
    "int4_64_fp32": (FormatName.INT4_F32, _nibbles(64, _single, zeros=(0, 17))),
    "int4_32_symmetric": (FormatName.Q4_0, _nibbles(32, _half, zeros=(8, 9))),
    "int4_channel": (FormatName.INT4_F32, _nibbles(0, _single, zeros=(8, 9))),
    "int4_act_order": (FormatName.INT4, _act_order),
    "nvfp4": (FormatName.NVFP4, _nibbles(16, _e4m3, levels=_E2M1, has_factors=True)),
    "mxfp4": (FormatName.MXFP4, _nibbles(32, _exponents, levels=_E2M1)),
    "nf4": (FormatName.LEVELS, _nibbles(64, _single, levels=_NF4)),
    "fp4": (FormatName.LEVELS, _nibbles(128, _single, levels=_FP4)),
    "int8_channel": (FormatName.INT8_F32, _bytes(0, _signed, _single)),
    "int8_32": (FormatName.Q8_0, _bytes(32, _signed, _half)),
    "fp8_128": (FormatName.FP8, _bytes(128, _every_float, _single)),
    "fp8_channel": (FormatName.FP8, _bytes(0, _every_float, _single)),
    "mxfp8": (FormatName.MXFP8, _bytes(32, _every_float, _exponents)),
}
FORMATS: list[str] = [*OF_GGUF, *_MADE]


def format_name(name: str) -> FormatName:
    return FormatName[name] if name in OF_GGUF else _MADE[name][0]


def random_weight(name: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Return a matrix with uniformly random codes, so that every bit matters."""
    if name in _MADE:
        return _MADE[name][1](num_outputs, num_inputs)
    kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
    blocks = random_blocks(GGMLQuantizationType[name], num_outputs * num_inputs // kind.block)
    return GGMLWeight(torch.from_numpy(blocks).view(num_outputs, -1), kind)
