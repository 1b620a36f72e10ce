"""Random-sign Hadamard rotation of rows, which spreads a row's outliers over all of its numbers.

    rotate(x) = c H (s * x)        H: Hadamard matrix, +-1        s: constant signs        c: a power of two
    unrotate(y) = s * (H y / (c n))                               H H = n, so unrotate(rotate(x)) = x

Rows rotate in parts of n numbers, the largest power of two that divides their length. Dot products change by a power of
two only: x . y = rotate(x) . rotate(y) / (c^2 n), where c^2 n is 1 or 2.

Only sums, sign flips and powers of two occur, in a fixed order, so that torch, Triton and C++ (engine/cpu/hadamard.h)
give the same bits. Method: Ashkboos et al. 2024, "QuaRot", arXiv:2404.00456.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from engine.kernels.language import jit, tl

# Bit i % 64 is set if number i changes its sign: the first fractional digits of pi. All replicas must use the same.
SIGNS = 0x243F6A8885A308D3


def part_of(dim: int) -> int:
    """Return n, the size of the parts in which rows of `dim` rotate."""
    return dim & -dim


def factor_of(dim: int) -> float:
    """Return c for rows of `dim`."""
    return 2.0 ** -((part_of(dim).bit_length() - 1) // 2)


def rotate(x: Tensor) -> Tensor:
    """Rotate rows (last dimension) of fp32."""
    dim = x.shape[-1]
    return _transform(x * (_signs(dim, x.device) * factor_of(dim)))


def unrotate(x: Tensor) -> Tensor:
    """Invert `rotate`: rows (last dimension) of fp32."""
    dim = x.shape[-1]
    return _transform(x).mul_(_signs(dim, x.device) / (factor_of(dim) * part_of(dim)))


def _transform(x: Tensor) -> Tensor:
    """Multiply each part of each row with H."""
    step = 1
    while step < part_of(x.shape[-1]):
        a, b = torch.unflatten(x, -1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x


@lru_cache
def _signs(dim: int, device: torch.device) -> Tensor:
    return torch.tensor([1.0 - 2.0 * (SIGNS >> i % 64 & 1) for i in range(dim)], device=device)


# The same in Triton, for rows of D numbers that are padded with zeros to a power of two.

_BITS = tl.constexpr(SIGNS) if tl else None


@jit
def rotate_tile(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Rotate rows (R, BLOCK_D) fp32."""
    return _transform_tile(_flip(x), D, 1)


@jit
def rotate_queries(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Rotate rows (R, BLOCK_D) fp32 with factor 1 / (c n), so that dot products with rows of `rotate_tile` are kept."""
    return _transform_tile(_flip(x), D, 0)


@jit
def unrotate_tile(x: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """Invert `rotate_tile`: rows (R, BLOCK_D) fp32."""
    return _flip(_transform_tile(x, D, 0))


@jit
def _flip(x: tl.tensor) -> tl.tensor:
    d = tl.arange(0, x.shape[1])
    is_flipped = ((tl.full([x.shape[1]], _BITS, tl.int64) >> (d % 64)) & 1) == 1
    return tl.where(is_flipped[None, :], -x, x)


@jit
def _transform_tile(x: tl.tensor, D: tl.constexpr, HALVED: tl.constexpr) -> tl.tensor:
    """Multiply each part of each row with H, and by 1/2 in every even (HALVED 0) or odd (HALVED 1) step."""
    R: tl.constexpr = x.shape[0]
    BLOCK_D: tl.constexpr = x.shape[1]
    for i in tl.static_range(10):
        if D % (2 << i) == 0:
            pairs = tl.permute(tl.reshape(x, [R, BLOCK_D // (2 << i), 2, 1 << i]), 0, 1, 3, 2)
            a, b = tl.split(pairs)
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), 0, 1, 3, 2), [R, BLOCK_D])
            if i % 2 == HALVED:
                x *= 0.5
    return x
