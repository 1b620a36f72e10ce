"""Gathering of whole blocks of keys and values into contiguous tokens.

Keys that many queries read are gathered once. The rows of a head are then equally spaced, as TMA needs, and codes are
dequantized once for all query heads and tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import has_fp8_casts, jit, power_of_2, tl
from engine.kernels.quant.hadamard import unrotate_tile
from engine.kernels.quant.row_quantization import (
    INT4,
    as_bytes,
    from_code,
    nibbles_in_columns,
    scale_and_zero,
)

# N gathered blocks, L = N * S keys, B blocks of the pool, K kv heads, S block_size, D head_dim


def launch_gather_rows(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, blocks_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the blocks' keys and values as `dtype`, each (L, K, D). blocks: int32."""
    _, _, num_heads, block_size, row_dim = codes_B2KSD.shape
    is_int4 = codes_B2KSD.dtype == INT4
    dim = 2 * row_dim if is_int4 else row_dim
    shape = (2, len(blocks_N) * block_size, num_heads, dim)
    k_LKD, v_LKD = torch.empty(shape, dtype=dtype, device=codes_B2KSD.device)
    _gather_rows[(len(blocks_N), num_heads)](
        as_bytes(codes_B2KSD),
        scales_B2KS,
        blocks_N,
        k_LKD,
        v_LKD,
        K=num_heads,
        S=block_size,
        D=dim,
        BLOCK_S=power_of_2(block_size),
        BLOCK_D=power_of_2(dim),
        IS_INT4=is_int4,
        NATIVE=has_fp8_casts(codes_B2KSD.device),
    )
    return k_LKD, v_LKD


@jit
def _gather_rows(
    codes: tl.tensor,
    scales: tl.tensor,
    blocks: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: one head's keys and values of one block."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    mask = (s < S)[:, None] & (d < D)[None, :]
    source = (tl.load(blocks + n).to(tl.int64) * 2 * K + head) * S + s
    target = ((n * S + s) * K + head)[:, None] * D + d[None, :]
    keys = load_rows(codes, scales, source, s < S, D, BLOCK_D, IS_INT4, NATIVE)
    values = load_rows(codes, scales, source + K * S, s < S, D, BLOCK_D, IS_INT4, NATIVE)
    tl.store(k + target, keys.to(k.dtype.element_ty), mask=mask)
    tl.store(v + target, values.to(v.dtype.element_ty), mask=mask)


@jit
def load_rows(
    codes: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Load rows (N) of a pool's layer or a payload as (N, BLOCK_D): in fp32 if quantized, else as they are."""
    if IS_INT4:
        e = tl.arange(0, BLOCK_D // 2)
        mask = is_row[:, None] & (e < D // 2)[None, :]
        pairs = tl.load(codes + rows[:, None] * (D // 2) + e[None, :], mask=mask, other=0)
        scale, zero = scale_and_zero(tl.load(scales + rows, mask=is_row, other=0))
        x = nibbles_in_columns(pairs, tl.float32) * scale[:, None] + zero[:, None]
        return unrotate_tile(tl.where((tl.arange(0, BLOCK_D) < D)[None, :], x, 0.0), D)
    d = tl.arange(0, BLOCK_D)
    x = tl.load(codes + rows[:, None] * D + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0)
    if scales is not None:
        scale = tl.load(scales + rows, mask=is_row, other=0.0).to(tl.float32)
        x = from_code(x, tl.float32, NATIVE) * scale[:, None]
    return x
