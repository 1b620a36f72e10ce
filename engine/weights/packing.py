"""Unpacking of codes of 2 to 8 bits from the words of published formats. Results are uint8."""

from __future__ import annotations

import torch
from torch import Tensor

# O outputs, I inputs, N rows, M words per row

# Output j of eight is nibble AWQ_ORDER[j] of a word.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words_NM: Tensor, bits: int, start: int, count: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return `count` codes of each row from bit `start` on, (N, count).

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
    """Return Marlin's scales (G, O) in the order of outputs; a single group has an order of its own."""
    tiles = (-1, 4, 4, 2) if scales_GO.shape[0] == 1 else (-1, 8, 8)
    return torch.unflatten(scales_GO, 1, tiles).transpose(2, 3).flatten(1)
