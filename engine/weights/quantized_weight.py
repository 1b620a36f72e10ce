"""Quantised matrices as they lie in memory, and how they become numbers again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from core.model.gguf_table import GGMLType

# O outputs, I inputs, G groups of inputs that share a scale, B bytes of a row of ggml's blocks


class QuantizedWeight(Protocol):
    """A (O, I) matrix of few bits."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, start: int, end: int) -> Tensor:
        """Rows [start, end) as numbers: (end - start, I) fp32, on the device where the codes are."""
        ...

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on `device`, if its numbers can be made there; else itself."""
        ...


@dataclass(frozen=True)
class GroupedWeight:
    """weight[o, i] = (code[o, i] - zero[o, g]) * scale[o, g] with g = group[i]: FP8, INT8, AWQ and GPTQ alike.

    codes: (O, I) float8_e4m3fn, int8 or uint8; or, of 4 bits, (O, ceil(I / 2)) uint8, the even input in the low half.
    scales: (O, G) fp32. zeros: (O, G) fp32, or None where codes are symmetric. group: (I,) int64.
    """

    codes: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    group_I: Tensor

    @classmethod
    def of_4_bits(cls, codes_OI: Tensor, scales_OG: Tensor, zeros_OG: Tensor, group_I: Tensor) -> GroupedWeight:
        """codes: (O, I), each in 0..15; they are packed here."""
        even = torch.nn.functional.pad(codes_OI, (0, codes_OI.shape[1] % 2)).to(torch.uint8)
        return cls(even[:, ::2] | even[:, 1::2] << 4, scales_OG, zeros_OG, group_I)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], len(self.group_I)

    def rows(self, start: int, end: int) -> Tensor:
        codes_OI = self.codes[start:end]
        if codes_OI.shape[1] != len(self.group_I):
            codes_OI = torch.stack((codes_OI & 15, codes_OI >> 4), dim=-1).flatten(1)[:, : len(self.group_I)]
        numbers_OI = codes_OI.float()
        if self.zeros_OG is not None:
            numbers_OI -= self.zeros_OG[start:end, self.group_I]
        return numbers_OI.mul_(self.scales_OG[start:end, self.group_I])

    def to(self, device: torch.device) -> GroupedWeight:
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG.to(device)
        return GroupedWeight(self.codes.to(device), self.scales_OG.to(device), zeros_OG, self.group_I.to(device))


@dataclass(frozen=True)
class GGMLWeight:
    """Whole blocks of a GGUF file, on the host. blocks: (O, B) uint8."""

    blocks_OB: Tensor
    kind: GGMLType

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks_OB.shape[0], self.blocks_OB.shape[1] // self.kind.num_bytes * self.kind.block

    def rows(self, start: int, end: int) -> Tensor:
        from gguf import GGMLQuantizationType  # here, for other formats are read where it is not installed
        from gguf.quants import dequantize

        stored = self.blocks_OB[start:end].numpy().reshape(-1)
        # gguf works through 16 rows at a time; rows of a hundred blocks, which need not be the matrix's, suit it best.
        wide = stored.reshape(-1, math.gcd(len(stored) // self.kind.num_bytes, 128) * self.kind.num_bytes)
        numbers = dequantize(np.ascontiguousarray(wide), GGMLQuantizationType[self.kind.name])
        return torch.from_numpy(numbers).view(end - start, -1)

    def to(self, device: torch.device) -> GGMLWeight:
        return self
