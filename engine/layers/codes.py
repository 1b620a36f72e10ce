"""Codes and scales of quantized matrices in the layout of the CPU kernels' formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cpu.structs import FormatName
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight

# O outputs, N spans (inputs that share one stored header), U units of 32 inputs per span, R runs per span

_UNIT = 32
_GROUPS = {32: FormatName.GROUPS_OF_32, 64: FormatName.GROUPS_OF_64, 128: FormatName.GROUPS_OF_128}


@dataclass(frozen=True)
class Codes:
    """Rows of a matrix in a format of formats.h.

    codes_ONU32: uint8 with `bits` significant bits. heads: (O, N, R, bytes of one number) uint8, in span order.
    """

    bits: int
    codes_ONU32: Tensor
    heads: tuple[Tensor, ...]


def format_of(weight: QuantizedWeight) -> FormatName | None:
    """Return the format that holds this matrix exactly; None if there is none."""
    if isinstance(weight, GGMLWeight):
        return FormatName.__members__.get(weight.kind.name)
    return _group_format(weight) if isinstance(weight, GroupedWeight) else None


def codes_of(weight: QuantizedWeight, start: int, end: int) -> Codes:
    """Return rows [start, end) of a matrix that has a format."""
    if isinstance(weight, GroupedWeight):
        return _groups(weight, start, end)
    assert isinstance(weight, GGMLWeight)
    blocks_ONB = torch.unflatten(weight.blocks_OB[start:end], 1, (-1, weight.kind.num_bytes))
    return _READERS[weight.kind.name](blocks_ONB)


# ---- GGUF: blocks of 32 inputs. A half-precision scale, a minimum (Q4_1, Q5_1), fifth bits, nibbles ----


def _block_of_32(blocks_ONB: Tensor, *, has_least: bool, has_fifth: bool) -> Codes:
    num_head = 4 if has_least else 2
    codes = _halves(blocks_ONB[..., -16:])
    if has_fifth:
        codes = codes | _bits(blocks_ONB[..., num_head : num_head + 4]) << 4
    heads = tuple(_number(blocks_ONB, at, 2) for at in range(0, num_head, 2))
    return Codes(5 if has_fifth else 4, codes.unsqueeze(2), heads)


def _q8_0(blocks_ONB: Tensor) -> Codes:
    return Codes(8, (blocks_ONB[..., 2:] ^ 128).unsqueeze(2), (_number(blocks_ONB, 0, 2),))


# ---- GGUF: blocks of 256 inputs (K) ----


def _nested(blocks_ONB: Tensor, *, has_fifth: bool) -> Codes:
    """Read Q4_K or Q5_K: d, dmin, eight 6-bit scales and eight 6-bit minimums in 12 bytes, fifth bits, nibbles."""
    packed = torch.unflatten(blocks_ONB[..., 4:16], -1, (3, 4))
    first, second, rest = packed.unbind(-2)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    leasts = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    codes = _halves(torch.unflatten(blocks_ONB[..., -128:], -1, (4, 32))).view(*blocks_ONB.shape[:2], 8, _UNIT)
    if has_fifth:
        run = torch.arange(8, dtype=torch.uint8, device=blocks_ONB.device).view(8, 1)
        codes = codes | (blocks_ONB[..., None, 16:48] >> run & 1) << 4
    heads = (_number(blocks_ONB, 0, 2), _number(blocks_ONB, 2, 2), scales.unsqueeze(-1), leasts.unsqueeze(-1))
    return Codes(5 if has_fifth else 4, codes, heads)


def _q6_k(blocks_ONB: Tensor) -> Codes:
    """Read Q6_K: two halves of 128 inputs with low 4 bits and upper 2 bits each; then 16 signed scales, and d."""
    low = torch.unflatten(blocks_ONB[..., :128], -1, (2, 2, 32))
    upper = torch.unflatten(blocks_ONB[..., 128:192], -1, (2, 1, 32))
    quarter = torch.arange(4, dtype=torch.uint8, device=blocks_ONB.device).view(4, 1)
    codes = torch.cat((low & 15, low >> 4), dim=-2) | (upper >> 2 * quarter & 3) << 4
    scales = blocks_ONB[..., 192:208].unsqueeze(-1)
    return Codes(6, codes.flatten(2, 3), (_number(blocks_ONB, 208, 2), scales))


_READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": lambda blocks: _block_of_32(blocks, has_least=False, has_fifth=False),
    "Q4_1": lambda blocks: _block_of_32(blocks, has_least=True, has_fifth=False),
    "Q5_0": lambda blocks: _block_of_32(blocks, has_least=False, has_fifth=True),
    "Q5_1": lambda blocks: _block_of_32(blocks, has_least=True, has_fifth=True),
    "Q8_0": _q8_0,
    "Q4_K": lambda blocks: _nested(blocks, has_fifth=False),
    "Q5_K": lambda blocks: _nested(blocks, has_fifth=True),
    "Q6_K": _q6_k,
}


def _halves(nibbles: Tensor) -> Tensor:
    """Return all low nibbles of the last dimension, then all high ones."""
    return torch.cat((nibbles & 15, nibbles >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Unpack (…, bytes) to (…, 8 bytes), lowest bit first."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(-2)


def _number(blocks_ONB: Tensor, at: int, num_bytes: int) -> Tensor:
    return blocks_ONB[..., None, at : at + num_bytes]


# ---- AWQ and GPTQ ----


def _group_format(weight: GroupedWeight) -> FormatName | None:
    """Return the format if groups are in order, scales exact in half precision, and zeros integer codes."""
    num_inputs, zeros_OG = weight.shape[1], weight.zeros_OG
    if zeros_OG is None or weight.codes.dtype != torch.uint8 or weight.codes.shape[1] * 2 != num_inputs:
        return None
    if weight.levels is not None or weight.factors_O is not None:
        return None
    size = _group_size(weight)
    in_order_I = weight.group_I[0] + torch.arange(num_inputs) // size
    is_exact = torch.equal(weight.scales_OG.half().float(), weight.scales_OG.float())
    is_code = torch.equal(zeros_OG.clamp(0, 255).to(torch.uint8).float(), zeros_OG)
    is_whole = num_inputs % size == 0 and torch.equal(weight.group_I, in_order_I)
    return _GROUPS.get(size) if is_whole and is_exact and is_code else None


def _group_size(weight: GroupedWeight) -> int:
    """Return the number of inputs in the first group."""
    return int((weight.group_I == weight.group_I[0]).sum())


def _groups(weight: GroupedWeight, start: int, end: int) -> Codes:
    nibbles = weight.codes[start:end]
    group_N = weight.group_I[:: _group_size(weight)]
    codes = torch.stack((nibbles & 15, nibbles >> 4), dim=-1).view(end - start, len(group_N), -1, _UNIT)
    assert weight.zeros_OG is not None
    scales = weight.scales_OG[start:end, group_N].half().view(torch.uint8).view(end - start, -1, 1, 2)
    zeros = weight.zeros_OG[start:end, group_N].to(torch.uint8).view(end - start, -1, 1, 1)
    return Codes(4, codes, (scales, zeros))
