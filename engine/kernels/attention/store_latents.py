"""Fused kernel from a latent layer's projections to its queries, with each token's row stored in the pool.

    row = (norm(latent), rotate(key), index key)      q_h = (nope_h, rotate(rope_h))

8-bit pools quantize the latent only. Models without sparse attention have no index key. Interleaved rotary pairs are
moved half a head apart, in queries and keys alike, so that products are unaffected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.quant.row_quantization import as_bytes, quantize_row
from engine.kernels.rms_norm import normed

# T tokens, H query heads, B blocks, S block_size, C latent_dim, P rope_dim, F = P / 2, X numbers of an index key,
# D = C + P + X, Q numbers of a query, the last P of them rotated

_HEADS_AT_ONCE = 8


def launch_store_latents(
    q_THQ: Tensor,
    row_TD: Tensor,
    norm_C: Tensor,
    eps: float,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    slots_T: Tensor,
    *,
    is_interleaved: bool,
    out_THN: Tensor,
) -> None:
    """Store rows at `slots_T` (int32 or int64, block id * S + offset; a negative slot stores nothing).

    Writes the last N numbers of each query, rotated part included, to `out`; N is P or Q.
    q, row: dense in their last dimension, row with the latent first; an index key is stored as it is. cos, sin:
    (T, 1, F). codes, scales: a layer of a latent pool; see engine/kv/layout.py. out: dense in N; may be a view, but not
    of q.
    """
    (num_tokens, num_heads, query_dim), rope_dim = q_THQ.shape, 2 * cos_T1F.shape[-1]
    assert q_THQ.stride(-1) == row_TD.stride(-1) == out_THN.stride(-1) == 1 and codes_B11SD.is_contiguous()
    latent_dim = len(norm_C)
    index_dim = row_TD.shape[1] - latent_dim - rope_dim
    codes = as_bytes(codes_B11SD)
    # View in which rotated keys are bf16 numbers.
    exact = codes_B11SD if scales_B11S is None else codes_B11SD.view(torch.bfloat16)
    num_copied = out_THN.shape[-1] - rope_dim
    _store_latents[(num_tokens, 1 + cdiv(num_heads, _HEADS_AT_ONCE))](
        q_THQ[..., query_dim - rope_dim - num_copied :],
        row_TD,
        norm_C,
        cos_T1F.contiguous(),
        sin_T1F.contiguous(),
        codes,
        exact,
        scales_B11S,
        slots_T,
        out_THN,
        q_THQ.stride(0),
        q_THQ.stride(1),
        row_TD.stride(0),
        out_THN.stride(0),
        out_THN.stride(1),
        eps,
        H=num_heads,
        N=num_copied,
        C=latent_dim,
        F=rope_dim // 2,
        X=index_dim,
        WIDTH=codes.shape[-1],
        EXACT_WIDTH=exact.shape[-1],
        BLOCK_H=_HEADS_AT_ONCE,
        BLOCK_N=power_of_2(max(1, num_copied)),
        BLOCK_C=power_of_2(latent_dim),
        BLOCK_F=power_of_2(rope_dim // 2),
        IS_INTERLEAVED=is_interleaved,
        num_warps=2,
    )


@jit
def _store_latents(
    q: tl.tensor,
    rows: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    codes: tl.tensor,
    exact: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    row_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT_WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> None:
    """One program: the row of one token (program 0 of axis 1), or BLOCK_H of its query heads."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        store_row(
            rows, norm, cos, sin, codes, exact, scales, slots, token, row_stride, eps,
            C, F, X, WIDTH, EXACT_WIDTH, BLOCK_C, BLOCK_F, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        h = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        source = q + token * q_token_stride + h[:, None] * q_head_stride
        target = out + token * out_token_stride + h[:, None] * out_head_stride
        if N > 0:
            n = tl.arange(0, BLOCK_N)
            mask = (h < H)[:, None] & (n < N)[None, :]
            tl.store(target + n[None, :], tl.load(source + n[None, :], mask=mask), mask=mask)
        turn, tilt, is_f = _angles(cos, sin, token, F, BLOCK_F)
        turn_rows(source + N, target + N, (h < H)[:, None] & is_f, turn, tilt, F, BLOCK_F, IS_INTERLEAVED)


@jit
def store_row(
    rows: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    codes: tl.tensor,
    exact: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    token: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT_WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> None:
    """Store one token's row in its slot, if it has one."""
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = rows + token * row_stride
        c, one = tl.arange(0, BLOCK_C), tl.arange(0, 1)
        latent = tl.load(row + c, mask=c < C, other=0.0)
        weight = tl.load(norm + c, mask=c < C, other=0.0)
        latent = normed(latent.to(tl.float32), weight, C, eps, latent.dtype)
        if scales is not None:
            code, scale = quantize_row(latent[None, :].to(tl.float32), (c < C)[None, :], codes.dtype.element_ty)
            tl.store(codes + slot * WIDTH + c[None, :], code, mask=(c < C)[None, :])
            tl.store(scales + slot + one[:, None], scale.to(tl.bfloat16))
        else:
            tl.store(codes + slot * WIDTH + c, latent.to(codes.dtype.element_ty), mask=c < C)
        key = exact + slot * EXACT_WIDTH + (EXACT_WIDTH - 2 * F - X) + one[:, None]
        turn, tilt, is_f = _angles(cos, sin, token, F, BLOCK_F)
        turn_rows(row + C + one[:, None], key, is_f, turn, tilt, F, BLOCK_F, IS_INTERLEAVED)
        for begin in range(0, X, 2 * BLOCK_F):
            n = begin + tl.arange(0, 2 * BLOCK_F)
            index = tl.load(row + C + 2 * F + n, mask=n < X, other=0.0)
            target = exact + slot * EXACT_WIDTH + (EXACT_WIDTH - X) + n
            tl.store(target, index.to(exact.dtype.element_ty), mask=n < X)


@jit
def _angles(
    cos: tl.tensor, sin: tl.tensor, token: tl.tensor, F: tl.constexpr, BLOCK_F: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return cosines, sines and the mask of one token's pairs, each (1, BLOCK_F)."""
    f = tl.arange(0, BLOCK_F)
    turn = tl.load(cos + token * F + f, mask=f < F, other=0.0).to(tl.float32)
    tilt = tl.load(sin + token * F + f, mask=f < F, other=0.0).to(tl.float32)
    return turn[None, :], tilt[None, :], (f < F)[None, :]


@jit
def turn_rows(
    source: tl.tensor,
    target: tl.tensor,
    mask: tl.tensor,
    turn: tl.tensor,
    tilt: tl.tensor,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> None:
    """Rotate rows (N, 1) of 2 F numbers each into `target`, by angles per row (N, F) or shared (1, F)."""
    f = tl.arange(0, BLOCK_F)[None, :]
    if IS_INTERLEAVED:
        first, second = tl.load(source + 2 * f, mask=mask, other=0.0), tl.load(source + 2 * f + 1, mask=mask, other=0.0)
    else:
        first, second = tl.load(source + f, mask=mask, other=0.0), tl.load(source + F + f, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    # Round to the activations' dtype first, whatever the target's dtype.
    tl.store(target + f, (x * turn - y * tilt).to(first.dtype).to(target.dtype.element_ty), mask=mask)
    tl.store(target + F + f, (y * turn + x * tilt).to(first.dtype).to(target.dtype.element_ty), mask=mask)
