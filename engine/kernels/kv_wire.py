"""Packing of KV between a pool and a segment's payload: gathers, selects heads, and quantizes for narrow wires.

Payload rows are ordered (token, side, head), side being keys, then values. Copying selects the heads of a segment, so
ranks of the two sides may hold different numbers of heads. Works one layer at a time. A latent layout has one side; its
rows are longer on an 8-bit wire than in the pool, because their last numbers are sent in bf16 (quantize_rows).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.cpu.library import Kernels, open_copies
from engine.cpu.structs import Coding, PoolView, Wire
from engine.kernels.attention.gather_rows import load_rows
from engine.kernels.attention.kv_write import store_rows
from engine.kernels.language import cdiv, has_fp8_casts, jit, power_of_2, tl
from engine.kernels.quant.row_quantization import INT4, as_bytes, dequantize_rows, quantize_rows

# T tokens, B blocks, P kv heads of the pool, K transferred heads, S block_size, D head_dim;
# 2: the sides, keys, then values

_VALUES_PER_PROGRAM = 4096
# Rows per program; scales are rows of one number.
_MAX_ROWS = 512


def pack_kv(pool_B2PSD: Tensor, slots_T: Tensor, heads: slice, codes_T2KD: Tensor, scales_T2K: Tensor | None) -> None:
    """Copy the heads' keys and values at `slots_T` (int64) from a pool's layer into a payload.

    codes: (T, 2, K, D), contiguous, of the pool's dtype; or quantized, with scales (T, 2, K), from a pool
    (B, 2, P, S, D) of bf16, fp16 or fp32, as quantize_rows does.
    """
    if codes_T2KD.is_cuda and not _exact(pool_B2PSD, codes_T2KD):
        launch_pack_kv(pool_B2PSD, slots_T, heads, codes_T2KD, scales_T2K)
    elif kernels := _compiled_for(pool_B2PSD, codes_T2KD, scales_T2K):
        kernels.pack_wire(wire_of(pool_B2PSD, slots_T, heads, codes_T2KD, scales_T2K))
    else:
        reference_pack_kv(pool_B2PSD, slots_T, heads, codes_T2KD, scales_T2K)


def unpack_kv(codes_T2KD: Tensor, scales_T2K: Tensor | None, pool_B2PSD: Tensor, slots_T: Tensor, heads: slice) -> None:
    """Write a payload's rows to a pool's layer at `slots_T`; the inverse of `pack_kv`."""
    if codes_T2KD.is_cuda and not _exact(pool_B2PSD, codes_T2KD):
        launch_unpack_kv(codes_T2KD, scales_T2K, pool_B2PSD, slots_T, heads)
    elif kernels := _compiled_for(pool_B2PSD, codes_T2KD, scales_T2K):
        kernels.unpack_wire(wire_of(pool_B2PSD, slots_T, heads, codes_T2KD, scales_T2K))
    else:
        reference_unpack_kv(codes_T2KD, scales_T2K, pool_B2PSD, slots_T, heads)


def _compiled_for(pool_B2PSD: Tensor, codes_T2KD: Tensor, scales_T2K: Tensor | None) -> Kernels | None:
    """Return the CPU kernels if they support this copy: plain in any dtype, quantized from and to bf16 only."""
    is_known = scales_T2K is None or pool_B2PSD.dtype == torch.bfloat16
    if pool_B2PSD.shape[1] != 2 or _exact(pool_B2PSD, codes_T2KD) or not is_known:
        return None
    return open_copies(pool_B2PSD.device)


def wire_of(pool_B2PSD: Tensor, slots_T: Tensor, heads: slice, codes_T2KD: Tensor, scales_T2K: Tensor | None) -> Wire:
    """Build the argument of `Kernels.pack_wire` and `unpack_wire`; arguments as pack_kv."""
    num_tokens, _, num_heads, row_dim = codes_T2KD.shape
    assert pool_B2PSD.is_contiguous() and codes_T2KD.is_contiguous() and slots_T.is_contiguous()
    assert len(slots_T) == num_tokens and slots_T.dtype == torch.int64
    wire = Wire(
        pool=PoolView(
            codes=pool_B2PSD.data_ptr(),
            kv_heads=pool_B2PSD.shape[2],
            block_size=pool_B2PSD.shape[3],
            head_dim=pool_B2PSD.shape[4],
        ),
        coding=Coding.PLAIN if scales_T2K is None else Coding.of(codes_T2KD.dtype),
        row_bytes=row_dim * codes_T2KD.element_size(),
        codes=codes_T2KD.data_ptr(),
        scales=None if scales_T2K is None else scales_T2K.data_ptr(),
        slots=slots_T.data_ptr(),
        tokens=num_tokens,
        first_head=heads.start,
        heads=num_heads,
    )
    # The struct holds their addresses only.
    wire.tensors = pool_B2PSD, slots_T, codes_T2KD, scales_T2K
    return wire


def reference_pack_kv(
    pool_B2PSD: Tensor, slots_T: Tensor, heads: slice, codes_T2KD: Tensor, scales_T2K: Tensor | None
) -> None:
    blocks_T, offsets_T = slots_T // pool_B2PSD.shape[3], slots_T % pool_B2PSD.shape[3]
    kv_T2KD = as_bytes(pool_B2PSD)[blocks_T, :, heads, offsets_T]
    if scales_T2K is None:
        as_bytes(codes_T2KD).copy_(kv_T2KD)
        return
    codes, scales = quantize_rows(kv_T2KD, codes_T2KD.dtype, exact=_exact(pool_B2PSD, codes_T2KD))
    codes_T2KD.copy_(codes)
    scales_T2K.copy_(scales)


def reference_unpack_kv(
    codes_T2KD: Tensor, scales_T2K: Tensor | None, pool_B2PSD: Tensor, slots_T: Tensor, heads: slice
) -> None:
    blocks_T, offsets_T = slots_T // pool_B2PSD.shape[3], slots_T % pool_B2PSD.shape[3]
    if scales_T2K is not None:
        codes_T2KD = dequantize_rows(codes_T2KD, scales_T2K, pool_B2PSD.dtype, exact=_exact(pool_B2PSD, codes_T2KD))
    as_bytes(pool_B2PSD)[blocks_T, :, heads, offsets_T] = as_bytes(codes_T2KD)


def launch_pack_kv(
    pool_B2PSD: Tensor, slots_T: Tensor, heads: slice, codes_T2KD: Tensor, scales_T2K: Tensor | None
) -> None:
    grid, sizes = _work(pool_B2PSD, codes_T2KD, scales_T2K, heads)
    _pack_kv[grid](as_bytes(pool_B2PSD), slots_T, as_bytes(codes_T2KD), scales_T2K, codes_T2KD.shape[0], **sizes)


def launch_unpack_kv(
    codes_T2KD: Tensor, scales_T2K: Tensor | None, pool_B2PSD: Tensor, slots_T: Tensor, heads: slice
) -> None:
    grid, sizes = _work(pool_B2PSD, codes_T2KD, scales_T2K, heads)
    pool, codes, native = as_bytes(pool_B2PSD), as_bytes(codes_T2KD), has_fp8_casts(codes_T2KD.device)
    _unpack_kv[grid](codes, scales_T2K, pool, slots_T, codes_T2KD.shape[0], **sizes, NATIVE=native)


def _work(
    pool_B2PSD: Tensor, codes_T2KD: Tensor, scales_T2K: Tensor | None, heads: slice
) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid of either kernel, and its arguments other than tensors."""
    num_tokens, num_sides, num_heads, _ = codes_T2KD.shape
    dim = pool_B2PSD.shape[-1]
    assert pool_B2PSD.is_contiguous() and codes_T2KD.is_contiguous()
    block_d = power_of_2(dim)
    rows = max(1, min(_MAX_ROWS, _VALUES_PER_PROGRAM // block_d))
    grid = (cdiv(num_tokens * num_sides * num_heads, rows),)
    first, _, _ = heads.indices(pool_B2PSD.shape[2])
    sizes = {"first_head": first, "P": pool_B2PSD.shape[2], "S": pool_B2PSD.shape[3], "D": dim, "K": num_heads}
    is_int4 = scales_T2K is not None and codes_T2KD.dtype == INT4
    return grid, sizes | {"SIDES": num_sides, "ROWS": rows, "BLOCK_D": block_d, "IS_INT4": is_int4}


def _exact(pool_B2PSD: Tensor, codes_T2KD: Tensor) -> int:
    """Return the number of trailing values of each row that are not quantized."""
    return max(0, codes_T2KD.shape[-1] - pool_B2PSD.shape[-1])


@jit
def _rows(
    slots: tl.tensor,
    num_tokens: tl.tensor,
    first_head: tl.tensor,
    P: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's index in the payload, its mask, its offsets in the pool, and their mask."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token, side, head = row // (SIDES * K), row // K % SIDES, row % K
    is_row = token < num_tokens
    slot = tl.load(slots + token, mask=is_row, other=0)
    place = ((slot // S * SIDES + side) * P + first_head + head) * S + slot % S
    d = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (d < D)[None, :]
    return row, is_row, place[:, None] * D + d[None, :], mask


@partial(jit, do_not_specialize=["num_tokens", "first_head"], anywhere=["slots"])
def _pack_kv(
    pool: tl.tensor,
    slots: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    num_tokens: tl.tensor,
    first_head: tl.tensor,
    P: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    row, is_row, in_pool, mask = _rows(slots, num_tokens, first_head, P, S, D, K, SIDES, ROWS, BLOCK_D)
    x = tl.load(pool + in_pool, mask=mask, other=0)
    store_rows(x, mask, is_row[:, None], codes, scales, row[:, None], D, IS_INT4)


@partial(jit, do_not_specialize=["num_tokens", "first_head"], anywhere=["slots"])
def _unpack_kv(
    codes: tl.tensor,
    scales: tl.tensor,
    pool: tl.tensor,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    first_head: tl.tensor,
    P: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    SIDES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    row, is_row, in_pool, mask = _rows(slots, num_tokens, first_head, P, S, D, K, SIDES, ROWS, BLOCK_D)
    x = load_rows(codes, scales, row, is_row, D, BLOCK_D, IS_INT4, NATIVE)
    tl.store(pool + in_pool, x.to(pool.dtype.element_ty), mask=mask)
