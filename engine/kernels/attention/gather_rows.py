"""Gathering of whole blocks of keys and values into contiguous tokens.

Keys that many queries read are gathered once. The rows of a head are then equally spaced, as TMA needs, and 8-bit codes
are dequantized once for all query heads and tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import has_fp8_casts, jit, power_of_2, tl
from engine.kernels.quant.row_quantization import as_bytes, dequantize_rows, from_code

# N gathered blocks, L = N * S keys, B blocks of the pool, K kv heads, S block_size, D head_dim


def gather_rows(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, blocks_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the blocks' keys and values as `dtype`, each (L, K, D). blocks: int32."""
    gather = launch_gather_rows if codes_B2KSD.is_cuda else reference_gather_rows
    return gather(codes_B2KSD, scales_B2KS, blocks_N, dtype)


def reference_gather_rows(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, blocks_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kv_N2KSD = as_bytes(codes_B2KSD)[blocks_N.long()].view(codes_B2KSD.dtype)
    if scales_B2KS is not None:
        kv_N2KSD = dequantize_rows(kv_N2KSD, scales_B2KS[blocks_N.long()], dtype)
    k_LKD, v_LKD = kv_N2KSD.to(dtype).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()
    return k_LKD, v_LKD


def launch_gather_rows(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, blocks_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _, _, num_heads, block_size, dim = codes_B2KSD.shape
    shape = (2, len(blocks_N) * block_size, num_heads, dim)
    k_LKD, v_LKD = torch.empty(shape, dtype=dtype, device=codes_B2KSD.device)
    has_scales = scales_B2KS is not None
    _gather_rows[(len(blocks_N), num_heads)](
        as_bytes(codes_B2KSD),
        scales_B2KS if has_scales else codes_B2KSD,
        blocks_N,
        k_LKD,
        v_LKD,
        K=num_heads,
        S=block_size,
        D=dim,
        BLOCK_S=power_of_2(block_size),
        BLOCK_D=power_of_2(dim),
        HAS_SCALES=has_scales,
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
    HAS_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: one head's keys and values of one block."""
    n, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    mask = (s < S)[:, None] & (d < D)[None, :]
    source = (tl.load(blocks + n).to(tl.int64) * 2 * K + head) * S + s
    target = ((n * S + s) * K + head)[:, None] * D + d[None, :]
    keys = tl.load(codes + source[:, None] * D + d[None, :], mask=mask, other=0)
    values = tl.load(codes + (source + K * S)[:, None] * D + d[None, :], mask=mask, other=0)
    if HAS_SCALES:
        k_scale = tl.load(scales + source, mask=s < S, other=0.0).to(tl.float32)
        v_scale = tl.load(scales + source + K * S, mask=s < S, other=0.0).to(tl.float32)
        keys = from_code(keys, tl.float32, NATIVE) * k_scale[:, None]
        values = from_code(values, tl.float32, NATIVE) * v_scale[:, None]
    tl.store(k + target, keys.to(k.dtype.element_ty), mask=mask)
    tl.store(v + target, values.to(v.dtype.element_ty), mask=mask)
