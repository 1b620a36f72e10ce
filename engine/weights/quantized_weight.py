"""Quantized matrices in memory, and their dequantization."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.model.gguf_file import GGMLType

# O outputs, I inputs, G groups of inputs that share a scale, B bytes per row of ggml blocks


class QuantizedWeight(Protocol):
    """Quantized (O, I) matrix."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, end: int) -> Tensor:
        """Dequantize rows [start, end): (end - start, I) fp32, on the device of the codes."""
        ...

    def select(self, rows_O: Tensor) -> QuantizedWeight:
        """Return the matrix of these rows, in this order. rows: (O,) int64."""
        ...

    def to(self, device: torch.device) -> QuantizedWeight:
        """Move to `device` if it can dequantize there; otherwise return self."""
        ...


# Numbers of the E2M1 codes, OCP Microscaling Formats 1.0, section 5.3.3.
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class GroupedWeight:
    """Matrix with scales per group of inputs; covers FP8, INT8, AWQ, GPTQ, NVFP4, MXFP4 and NF4.

    weight[o, i] = (level(code[o, i]) - zero[o, g]) * scale[o, g] * factor[o] with g = group[i].
    codes: (O, I) float8, int8 or uint8; or 4-bit (O, ceil(I / 2)) uint8, the even input in the low half.
    scales: (O, G) in any float dtype, as stored. zeros: (O, G) uint8, int8 or fp32; None for symmetric codes. group:
    (I,) int64.
    levels: (16,) fp32, the number of each 4-bit code; None: the code itself. factors: (O,) fp32; None: 1.
    activations: dtype to which the format quantizes each row of inputs at run time; None: it does not.
    """

    codes: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    group_I: Tensor
    levels: Tensor | None = None
    factors_O: Tensor | None = None
    activations: torch.dtype | None = None

    @classmethod
    def of_4_bits(
        cls,
        codes_OI: Tensor,
        scales_OG: Tensor,
        zeros_OG: Tensor | None,
        group_I: Tensor,
        *,
        levels: Tensor | None = None,
        factors_O: Tensor | None = None,
    ) -> GroupedWeight:
        """Pack 4-bit codes. codes: (O, I), each in 0..15."""
        return cls(pack_4_bits(codes_OI), scales_OG, zeros_OG, group_I, levels, factors_O)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], len(self.group_I)

    def rows(self, start: int, end: int) -> Tensor:
        codes_OI = self.codes[start:end]
        if codes_OI.shape[1] != len(self.group_I):
            codes_OI = unpack_4_bits(codes_OI, len(self.group_I))
        numbers_OI = codes_OI.float() if self.levels is None else self.levels[codes_OI.long()]
        if self.zeros_OG is not None:
            numbers_OI -= self.zeros_OG[start:end, self.group_I]
        numbers_OI *= self._scales(start, end)[:, self.group_I]
        return numbers_OI

    def select(self, rows_O: Tensor) -> GroupedWeight:
        zeros_OG = self.zeros_OG if self.zeros_OG is None else self.zeros_OG[rows_O]
        factors_O = self.factors_O if self.factors_O is None else self.factors_O[rows_O]
        return replace(
            self, codes=self.codes[rows_O], scales_OG=self.scales_OG[rows_O], zeros_OG=zeros_OG, factors_O=factors_O
        )

    def to(self, device: torch.device) -> GroupedWeight:
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value := getattr(self, field.name), Tensor) else value
            for field in fields(self)
        }
        return GroupedWeight(**moved)

    def _scales(self, start: int, end: int) -> Tensor:
        scales_OG = self.scales_OG[start:end].float()
        return scales_OG if self.factors_O is None else scales_OG * self.factors_O[start:end, None]


def pack_4_bits(codes_OI: Tensor) -> Tensor:
    """Pack codes 0..15 in pairs, (O, ceil(I / 2)) uint8, the even input in the low half."""
    even = torch.nn.functional.pad(codes_OI.to(torch.uint8), (0, codes_OI.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


def unpack_4_bits(codes: Tensor, num_inputs: int) -> Tensor:
    """Return the codes that `pack_4_bits` packed: (O, I) uint8."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :num_inputs]


def is_special(codes: Tensor) -> Tensor:
    """Return which float8 codes are NaN or infinite."""
    bits = codes.view(torch.uint8)
    if codes.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return bits == 0x80
    return bits & 0x7F >= (0x7C if codes.dtype == torch.float8_e5m2 else 0x7F)


@dataclass(frozen=True)
class ScaledColumns:
    """Matrix with a factor per input channel (ModelOpt's pre_quant_scale). No kernel multiplies it as stored."""

    weight: GroupedWeight
    factors_I: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape

    def rows(self, start: int, end: int) -> Tensor:
        return self.weight.rows(start, end) * self.factors_I

    def select(self, rows_O: Tensor) -> ScaledColumns:
        return ScaledColumns(self.weight.select(rows_O), self.factors_I)

    def to(self, device: torch.device) -> ScaledColumns:
        return ScaledColumns(self.weight.to(device), self.factors_I.to(device))


@dataclass(frozen=True)
class GGMLWeight:
    """Whole quantization blocks of a GGUF file, on the host. blocks: (O, B) uint8."""

    blocks_OB: Tensor
    kind: GGMLType

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks_OB.shape[0], self.blocks_OB.shape[1] // self.kind.num_bytes * self.kind.block

    def rows(self, start: int, end: int) -> Tensor:
        # Imported here because gguf is optional for other formats.
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.blocks_OB[start:end].numpy().reshape(-1)
        # gguf processes 16 rows at a time and is fastest with rows of about 100 blocks, whatever the matrix's shape.
        wide = stored.reshape(-1, math.gcd(len(stored) // self.kind.num_bytes, 128) * self.kind.num_bytes)
        numbers = dequantize(np.ascontiguousarray(wide), GGMLQuantizationType[self.kind.name])
        return torch.from_numpy(numbers).view(end - start, -1)

    def select(self, rows_O: Tensor) -> GGMLWeight:
        return GGMLWeight(self.blocks_OB[rows_O], self.kind)

    def to(self, device: torch.device) -> GGMLWeight:
        return self
