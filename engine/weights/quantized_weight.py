"""Quantized matrices in memory, their dequantization, and unpacking of codes from the words of published formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.model.gguf_file import GGMLType

# O outputs, I inputs, G groups of inputs that share a scale, B bytes per row of ggml blocks, N rows, M words per row
# Output j of eight is nibble AWQ_ORDER[j] of a word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


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


def unpack(words_NM: Tensor, bits: int, start: int, count: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return `count` codes of 2 to 8 bits of each row from bit `start` on, (N, count) uint8.

    Codes follow each other from the lowest bit on, also across words. order: code of each word at each place.
    """
    if order is not None:
        skipped, size = start // bits, len(order)
        whole = unpack(words_NM, bits, 0, -(-(skipped + count) // size) * size)
        return torch.unflatten(whole, 1, (-1, size))[..., list(order)].flatten(1)[:, skipped : skipped + count]
    # Not contiguous(): it keeps any stride of a single column, and view() needs 1.
    bytes_NB = words_NM.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = bytes_NB.unsqueeze(-1) >> shifts & (1 << bits) - 1
        return codes.flatten(1)[:, start // bits :][:, :count]
    first = torch.arange(start, start + count * bits, bits)
    # A code spans one byte or two. A last code in one byte ignores the second, so the index may be clamped.
    low, high = (bytes_NB[:, (first // 8 + i).clamp(max=bytes_NB.shape[1] - 1)].to(torch.int16) for i in range(2))
    return ((low | high << 8) >> (first % 8).to(torch.int16) & (1 << bits) - 1).to(torch.uint8)


def fast_codes(words: Tensor) -> Tensor:
    """Unpack AWQ's layout gemv_fast, (O / 4, I) int16, to (O, I).

    A row of words alternates runs of 64 inputs of four outputs. Inside 32 inputs, pairs of four groups of eight are
    interleaved; inside eight codes, the even ones come first.
    """
    num_inputs = words.shape[1]
    codes = torch.unflatten(unpack(words, 4, 0, 4 * num_inputs), 1, (-1, 4, 64))
    runs = codes.transpose(1, 2).reshape(-1, num_inputs)
    pairs = torch.unflatten(runs, 1, (-1, 4, 2, 4)).transpose(-1, -2)
    return pairs.transpose(2, 3).flatten(1)


def fast_zeros(stored: Tensor, scales: Tensor) -> Tensor:
    """Return the integer zeros of gemv_fast, which stores -zero * scale in half precision; groups of padding get 0."""
    zeros = -stored.float() / scales.float()
    return torch.where((scales == 0) & (stored == 0), 0.0, zeros).round()


def marlin_codes(words: Tensor) -> Tensor:
    """Unpack Marlin's layout, (I / 16, 2 O) int32, to (O, I): 16 by 16 tiles in the order of a tensor core's lanes.

    Source: Frantar et al. 2024, arXiv:2408.11743.
    """
    # Tile row, four tiles; then column, row pair, tile of the four, row of the pair, upper columns, upper rows.
    lanes = torch.unflatten(unpack(words, 4, 0, 8 * words.shape[1]), 1, (-1, 8, 4, 4, 2, 2, 2))
    return lanes.permute(1, 4, 6, 2, 0, 7, 3, 5).flatten(4).flatten(0, 3)


def marlin_scales(scales_GO: Tensor) -> Tensor:
    """Return Marlin's scales (G, O) in the order of outputs; a single group has a different order."""
    tiles = (-1, 4, 4, 2) if scales_GO.shape[0] == 1 else (-1, 8, 8)
    return torch.unflatten(scales_GO, 1, tiles).transpose(2, 3).flatten(1)
