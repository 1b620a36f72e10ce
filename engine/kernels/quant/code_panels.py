"""Low-bit matrices in the memory order of the GPU product kernels, and their dequantization.

Panels hold 64 outputs. A panel is a sequence of units of inputs, each with 64 rows of K 16-bit words. A word holds two
(8 bits) or four codes; code p of word k belongs to the unit's input K p + k. A program thus reads 16 adjacent bytes at
a time, and a tile of words is a tile of codes for each position (code_words.py). Scales are stored per panel beside the
codes: weight = (scale * code + least) * factor, with one scale per `group` inputs and one factor per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.quant.code_words import E2M1, NIBBLES
from engine.kernels.quant.row_quantization import as_bytes

# P panels of 64 outputs, U units of inputs, K words per output and unit, G groups of inputs with a scale each,
# N runs of 256 inputs, X experts (leading dimension, if there are several)

# Outputs per panel.
ROWS = 64
# Inputs of a K-format super block; rows are padded to whole runs.
RUN = 256
# Inputs per loop iteration for codes of 8 bits, enough to amortize its overhead; others take a run.
_SPAN_OF_BYTES = 128


@dataclass(frozen=True)
class CodePanels:
    """Low-bit matrix (O, I), or several of one shape.

    kind: see code_words. group: inputs per scale, 16 to 128; 0: factors only. words: (P, U, 64, K) int16. high:
    (P, N, 1 or 2, 64, K) int16, for 5 and 6 bits. scales: (P, G, 64) fp32, fp16 or bf16; or e4m3 or e8m0; or 8-bit
    integers that multiply supers (P, N, 64) fp16. leasts: (P, G, 64) fp32, fp16 or bf16 to add, or uint8 zero codes, or
    8-bit integers that multiply super_leasts and are subtracted; None: center_of(kind) is subtracted from codes. 8-bit
    values are (P, spans, 64, groups of a span), so that one load gets several. factors: (P, 1, 64) fp32; None: 1.
    levels: the 16 numbers of E2M1 and LEVELS.
    """

    kind: int
    group: int
    shape: tuple[int, int]
    words: Tensor
    scales: Tensor | None = None
    high: Tensor | None = None
    leasts: Tensor | None = None
    supers: Tensor | None = None
    super_leasts: Tensor | None = None
    factors: Tensor | None = None
    levels: tuple[float, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def num_positions(self) -> int:
        """Number of codes in a word."""
        return positions_of(self.kind)

    @property
    def num_units(self) -> int:
        return self.words.shape[-3]

    @property
    def units_of_a_span(self) -> int:
        """Units per loop iteration."""
        return span_of(self.kind) // (self.num_positions * self.words.shape[-1])

    def expert(self, index: int) -> CodePanels:
        """Return one of several matrices, as a view."""
        tensors: dict[str, Any] = {name: tensor[index] for name, tensor in self.tensors().items()}
        return replace(self, **tensors)

    @classmethod
    def stack(cls, each: Sequence[CodePanels]) -> CodePanels | None:
        """Stack matrices; None if they differ in format."""
        first = each[0]
        parts = [panels.tensors() for panels in each]
        kinds = {(panels.kind, panels.group, panels.shape, panels.levels, tuple(panels.tensors())) for panels in each}
        if len(kinds) > 1:
            return None
        tensors: dict[str, Any] = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        return replace(first, **tensors)

    def tensors(self) -> dict[str, Tensor]:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


def center_of(kind: int) -> int:
    """Return the number that the kernels subtract from unsigned codes."""
    return 1 << kind - 1 if kind >= NIBBLES else 0


def positions_of(kind: int) -> int:
    """Return the number of codes in a word."""
    return 2 if kind < E2M1 else 4


def span_of(kind: int) -> int:
    """Return the inputs per loop iteration of a product."""
    return _SPAN_OF_BYTES if kind < E2M1 else RUN


def words_of_a_unit(kind: int, group: int) -> int:
    """Return K, the words per output and unit: 16 or more, as products need. A group fills a unit or some positions."""
    return 16 if kind > NIBBLES else max(16, (group or 128) // positions_of(kind))


def pack_words(codes_OI: Tensor, kind: int, group: int) -> tuple[Tensor, Tensor | None]:
    """Pack codes (O, I) uint8 (the bits of int8 and e4m3) into words and high bits, padded to whole panels and runs."""
    num_words, positions = words_of_a_unit(kind, group), positions_of(kind)
    padded = torch.nn.functional.pad(codes_OI, (0, -codes_OI.shape[1] % RUN, 0, -len(codes_OI) % ROWS))
    panels = padded.view(-1, ROWS, padded.shape[1] // (positions * num_words), positions, num_words)
    codes_PU64jK = panels.transpose(1, 2)
    if positions == 2:
        return codes_PU64jK.transpose(-1, -2).contiguous().view(torch.int16).squeeze(-1), None
    words = _shifted(codes_PU64jK & 15, 4)
    if kind <= NIBBLES:
        return words, None
    bits = kind - 4
    upper = torch.unflatten(codes_PU64jK >> 4, 1, (-1, 4 // bits)).transpose(2, 3)  # (P, word runs, 64, u, j, K)
    return words, torch.unflatten(_shifted(upper.flatten(3, 4), bits), 1, (-1, bits))


def in_panels(values_OG: Tensor, kind: int, group: int) -> Tensor:
    """Arrange values (O, G) of groups as (P, G, 64), or bytes as (P, spans, 64, groups), padded with zeros."""
    padded = torch.nn.functional.pad(as_bytes(values_OG), (0, 0, 0, -len(values_OG) % ROWS))
    panels_P64G = padded.view(-1, ROWS, padded.shape[1])
    if values_OG.element_size() == 1:
        in_spans = torch.unflatten(panels_P64G, 2, (-1, span_of(kind) // group)).transpose(1, 2).contiguous()
        return in_spans.view(values_OG.dtype)
    return panels_P64G.transpose(1, 2).contiguous()


def as_words(values: Tensor) -> Tensor:
    """View the 8-bit values of a span as 32-bit words, or 16-bit words if there are only two."""
    if values.element_size() > 1:
        return values
    return values.view(torch.int32 if values.shape[-1] >= 4 else torch.int16)


def _shifted(codes_jK: Tensor, bits: int) -> Tensor:
    """Combine (…, j, K) into (…, K) int16, code j at bit j * bits."""
    shifts = torch.arange(codes_jK.shape[-2], dtype=torch.int32, device=codes_jK.device).unsqueeze(-1) * bits
    return (codes_jK.to(torch.int32) << shifts).sum(dim=-2, dtype=torch.int32).to(torch.int16)
