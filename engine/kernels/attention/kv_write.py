"""KV cache write: stores a step's keys and values in their blocks, quantized if the pool has scales."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.quant.row_quantization import INT4, as_bytes, quantize_int4, quantize_row, quantize_rows

# T tokens, B blocks, K kv heads of this rank, S block_size, D head_dim; 2: keys, then values

_VALUES_PER_PROGRAM = 4096


def write_kv(codes_B2KSD: Tensor, scales_B2KS: Tensor | None, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Store keys and values at `slots_T` (int32 or int64, block id * S + offset).

    codes, scales: a pool's layer, (B, 2, K, S, D) and (B, 2, K, S); see KVPool. k, v: (T, K, D) of any float dtype,
    dense in D; may be views. A negative slot marks a padding row and writes nothing.
    """
    store = launch_write_kv if k_TKD.is_cuda else reference_write_kv
    store(codes_B2KSD, scales_B2KS, slots_T, k_TKD, v_TKD)


def reference_write_kv(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor
) -> None:
    is_stored_T = slots_T >= 0
    rows_T2KD = torch.stack((k_TKD, v_TKD), dim=1)
    write_rows(codes_B2KSD, scales_B2KS, slots_T[is_stored_T], rows_T2KD[is_stored_T])


def write_rows(codes_B2KSD: Tensor, scales_B2KS: Tensor | None, slots_T: Tensor, rows_T2KD: Tensor) -> None:
    """Store rows with torch, on any device, for one or two sides. Slots must not be negative.

    If the rows of an 8-bit pool are longer than those given, the trailing numbers stay in bf16; see quantize_rows.
    """
    block_size = codes_B2KSD.shape[3]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    if scales_B2KS is None:
        codes_B2KSD[blocks_T, :, :, offsets_T] = rows_T2KD.to(codes_B2KSD.dtype)
        return
    exact = max(0, codes_B2KSD.shape[-1] - rows_T2KD.shape[-1])
    codes_T2KD, scales_T2K = quantize_rows(rows_T2KD, codes_B2KSD.dtype, exact=exact)
    scales_B2KS[blocks_T, :, :, offsets_T] = scales_T2K
    as_bytes(codes_B2KSD)[blocks_T, :, :, offsets_T] = as_bytes(codes_T2KD)


def launch_write_kv(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor
) -> None:
    num_tokens, num_heads, dim = k_TKD.shape
    block_d = power_of_2(dim)
    rows = max(1, _VALUES_PER_PROGRAM // block_d)
    assert k_TKD.stride(-1) == v_TKD.stride(-1) == 1 and codes_B2KSD.is_contiguous()
    _write_kv[(cdiv(num_tokens * num_heads, rows), 2)](
        as_bytes(codes_B2KSD),
        scales_B2KS,
        slots_T,
        k_TKD,
        v_TKD,
        num_tokens,
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        K=num_heads,
        S=codes_B2KSD.shape[3],
        D=dim,
        ROWS=rows,
        BLOCK_D=block_d,
        IS_INT4=codes_B2KSD.dtype == INT4,
    )


@partial(jit, do_not_specialize=["num_tokens"])
def _write_kv(
    codes: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    num_tokens: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """One program: ROWS rows (token, head) of the keys (program 0 of axis 1) or of the values."""
    side = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, head = row // K, row % K
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    place = ((slot // S * 2 + side) * K + head) * S + slot % S
    d = tl.arange(0, BLOCK_D)
    mask = (slot >= 0)[:, None] & (d < D)[None, :]
    if side == 0:
        source = k + (token * k_token_stride + head * k_head_stride)[:, None] + d[None, :]
        x = tl.load(source, mask=mask, other=0.0)
    else:
        source = v + (token * v_token_stride + head * v_head_stride)[:, None] + d[None, :]
        x = tl.load(source, mask=mask, other=0.0)
    store_rows(x, mask, (slot >= 0)[:, None], codes, scales, place[:, None], D, IS_INT4)


@jit
def store_rows(
    x: tl.tensor,
    mask: tl.tensor,
    is_row: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    place: tl.tensor,
    D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """Store rows (N, BLOCK_D), zero from D on, at `place` (N, 1), counted in rows, of a pool's layer or a payload.

    mask: (N, BLOCK_D), of existing numbers; is_row: (N, 1).
    """
    BLOCK_D: tl.constexpr = x.shape[1]
    target = codes + place * D + tl.arange(0, BLOCK_D)[None, :]
    if IS_INT4:
        pairs, words = quantize_int4(x.to(tl.float32), D)
        e = tl.arange(0, BLOCK_D // 2)[None, :]
        tl.store(codes + place * (D // 2) + e, pairs, mask=is_row & (e < D // 2))
        tl.store(scales + place, words, mask=is_row)
    elif scales is not None:
        code, scale = quantize_row(x.to(tl.float32), mask, codes.dtype.element_ty)
        tl.store(target, code, mask=mask)
        tl.store(scales + place, scale.to(tl.bfloat16), mask=is_row)
    else:
        tl.store(target, x.to(codes.dtype.element_ty), mask=mask)
