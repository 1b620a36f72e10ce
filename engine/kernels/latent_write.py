"""Latent rows of a step into their blocks: in a pool of 8 bits the latent is quantised, the rotated key is not."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.eight_bits import as_bytes, quantize_row
from engine.kernels.kv_write import write_rows
from engine.kernels.language import cdiv, jit, power_of_2, tl

# T tokens, B blocks, S block_size, D = C + P: latent_dim C and rope_dim P

_VALUES_PER_PROGRAM = 4096


def write_latents(
    codes_B11SD: Tensor, scales_B11S: Tensor | None, slots_T: Tensor, rows_TD: Tensor, *, rope_dim: int
) -> None:
    """Store rows at `slots_T` (int32 or int64, block id * S + offset); a negative slot writes nothing.

    codes, scales: a layer of a latent pool; see engine/kv/layout.py. rows: (T, C + P) of any float dtype, contiguous.
    """
    store = launch_write_latents if rows_TD.is_cuda else reference_write_latents
    store(codes_B11SD, scales_B11S, slots_T, rows_TD, rope_dim=rope_dim)


def reference_write_latents(
    codes_B11SD: Tensor, scales_B11S: Tensor | None, slots_T: Tensor, rows_TD: Tensor, *, rope_dim: int
) -> None:
    is_stored_T = slots_T >= 0
    write_rows(codes_B11SD, scales_B11S, slots_T[is_stored_T], rows_TD[is_stored_T, None, None])


def launch_write_latents(
    codes_B11SD: Tensor, scales_B11S: Tensor | None, slots_T: Tensor, rows_TD: Tensor, *, rope_dim: int
) -> None:
    num_tokens, dim = rows_TD.shape
    assert rows_TD.is_contiguous() and codes_B11SD.is_contiguous()
    has_scales, block_c = scales_B11S is not None, power_of_2(dim - rope_dim)
    rows = max(1, _VALUES_PER_PROGRAM // block_c)
    codes = as_bytes(codes_B11SD)
    exact = codes_B11SD.view(torch.bfloat16) if has_scales else codes_B11SD  # where rotated keys are numbers
    _write_latents[(cdiv(num_tokens, rows),)](
        codes,
        exact,
        scales_B11S if has_scales else codes,
        slots_T,
        rows_TD,
        num_tokens,
        C=dim - rope_dim,
        P=rope_dim,
        WIDTH=codes.shape[-1],
        EXACT_WIDTH=exact.shape[-1],
        ROWS=rows,
        BLOCK_C=block_c,
        BLOCK_P=power_of_2(rope_dim),
        HAS_SCALES=has_scales,
    )


@partial(jit, do_not_specialize=["num_tokens"])
def _write_latents(
    codes: tl.tensor,
    exact: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    num_tokens: tl.tensor,
    C: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """One program: ROWS tokens."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    is_stored = (slot >= 0)[:, None]
    c, p = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    is_latent, is_key = is_stored & (c < C)[None, :], is_stored & (p < P)[None, :]
    latent = tl.load(rows + token[:, None] * (C + P) + c[None, :], mask=is_latent, other=0.0)
    key = tl.load(rows + token[:, None] * (C + P) + C + p[None, :], mask=is_key, other=0.0)
    target = codes + slot[:, None] * WIDTH + c[None, :]
    if HAS_SCALES:
        code, scale = quantize_row(latent.to(tl.float32), is_latent, codes.dtype.element_ty)
        tl.store(target, code, mask=is_latent)
        tl.store(scales + slot[:, None], scale.to(tl.bfloat16), mask=is_stored)
    else:
        tl.store(target, latent.to(codes.dtype.element_ty), mask=is_latent)
    key_target = exact + slot[:, None] * EXACT_WIDTH + (EXACT_WIDTH - P) + p[None, :]
    tl.store(key_target, key.to(exact.dtype.element_ty), mask=is_key)
