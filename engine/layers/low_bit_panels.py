"""Packing of low-bit matrices into panels of 16 outputs, in the order of formats.h; codes are unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.structs import FormatName
from engine.layers.codes import Codes, Format, rows_of
from engine.weights.quantized_weight import QuantizedWeight

# O outputs, P panels of 16 outputs, N spans of inputs, U units of 32 inputs per span, B bytes per span

_PANEL = 16
# Codes per chunk; bounds the memory that packing needs beside the matrix.
_WIDENED_AT_ONCE = 1 << 22
_FLOATS = (FormatName.FP8, FormatName.MXFP8)


def pack(weights: Sequence[QuantizedWeight], form: Format) -> Tensor:
    """Pack the rows of several weights of equal width and this format as one matrix: (P, N, B) uint8."""
    num_outputs, num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    step = max(1, _WIDENED_AT_ONCE // num_inputs // _PANEL) * _PANEL
    packed = None
    for start in range(0, num_outputs, step):
        rows = _panels(_rows(weights, form, start, min(start + step, num_outputs)), is_float=form.name in _FLOATS)
        if packed is None:
            packed = torch.empty(-(-num_outputs // _PANEL), *rows.shape[1:], dtype=torch.uint8)
        packed[start // _PANEL :][: len(rows)] = rows
    assert packed is not None
    return packed


def _rows(weights: Sequence[QuantizedWeight], form: Format, start: int, end: int) -> Codes:
    """Return rows [start, end) of the concatenated weights."""
    parts, first = [], 0
    for weight in weights:
        low, high = max(start, first), min(end, first + weight.shape[0])
        if low < high:
            parts.append(rows_of(weight, form, low - first, high - first))
        first += weight.shape[0]
    heads = zip(*(part.heads for part in parts), strict=True)
    codes = torch.cat([part.codes_ONU32 for part in parts])
    return Codes(parts[0].bits, codes, tuple(torch.cat(head) for head in heads))


def _panels(rows: Codes, *, is_float: bool) -> Tensor:
    """Arrange rows in panels: (P, N, B)."""
    codes_PNU864 = _by_panel(torch.unflatten(rows.codes_ONU32, -1, (8, 4)))
    if is_float:
        # Of four outputs, the first two inputs before the others.
        codes_PNU864 = torch.unflatten(codes_PNU864, -1, (4, 4, 2, 2)).transpose(-3, -2).flatten(-4)
    codes = torch.cat([part.flatten(3) for part in _planes(codes_PNU864, rows.bits)], dim=-1)
    return torch.cat([*(_by_panel(head).flatten(2) for head in rows.heads), codes.flatten(2)], dim=-1)


def _by_panel(values: Tensor) -> Tensor:
    """Interleave rows of each panel, padded with zeros: (O, …, C) -> (P, …, 16 C)."""
    padded = F.pad(values, (0, 0) * (values.dim() - 1) + (0, -len(values) % _PANEL))
    return torch.unflatten(padded, 0, (-1, _PANEL)).movedim(1, -2).flatten(-2)


def _planes(codes_PNU864: Tensor, bits: int) -> list[Tensor]:
    """Return the bit planes of a unit's codes, as defined in formats.h."""
    if bits == 8:
        return [codes_PNU864]
    even, odd = (codes_PNU864[..., first::2, :] & 15 for first in (0, 1))
    planes = [even | odd << 4]
    if bits > 4:
        # Number of codes whose upper bits fill a byte.
        groups = 8 // (bits - 4)
        shift = torch.arange(groups, dtype=torch.uint8).view(groups, 1) * (bits - 4)
        upper = torch.unflatten(codes_PNU864 >> 4, -2, (-1, groups)) << shift
        planes.append(upper.sum(dim=-2, dtype=torch.uint8))
    return planes
