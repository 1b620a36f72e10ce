"""Fused kernel before latent decode attention: stores rows as in store_latents.py, and absorbs queries.

    absorbed_h = (K_h^T nope_h, rotate(rope_h))      q_h = (nope_h, rope_h)

The first programs store rows, one token each. Each further program computes a tile of tokens and latent features of one
head.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.attention.store_latents import store_row, turn_rows
from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.quant.row_quantization import as_bytes

# T tokens, H query heads, B blocks, S block_size, C latent_dim, P rope_dim, X numbers of an index key, D = C + P (rows:
# + X), F = P / 2, N nope_dim, Q = N + P

# Tokens per program.
_FEW, _MANY = 16, 64
_BLOCK_C = 128


def launch_absorb_queries(
    q_THQ: Tensor,
    row_TD: Tensor,
    norm_C: Tensor,
    eps: float,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    slots_T: Tensor,
    key_HNC: Tensor,
    *,
    is_interleaved: bool,
) -> Tensor:
    """Store rows at `slots_T`, as launch_store_latents does, and return the absorbed queries (T, H, D).

    q, row: dense in their last dimension, may be views. key: contiguous, of q's dtype. Products accumulate in fp32.
    """
    (num_tokens, num_heads, _), (_, nope_dim, latent_dim) = q_THQ.shape, key_HNC.shape
    rope_dim = 2 * cos_T1F.shape[-1]
    assert q_THQ.stride(-1) == row_TD.stride(-1) == 1 and codes_B11SD.is_contiguous() and key_HNC.is_contiguous()
    out_THD = torch.empty(num_tokens, num_heads, latent_dim + rope_dim, dtype=q_THQ.dtype, device=q_THQ.device)
    codes = as_bytes(codes_B11SD)
    # View in which rotated keys are bf16 numbers.
    exact = codes_B11SD if scales_B11S is None else codes_B11SD.view(torch.bfloat16)
    block_t = _FEW if num_tokens <= _FEW else _MANY
    parts = cdiv(latent_dim, _BLOCK_C)
    _absorb_queries[(num_tokens + cdiv(num_tokens, block_t) * num_heads * parts,)](
        q_THQ,
        row_TD,
        norm_C,
        cos_T1F.contiguous(),
        sin_T1F.contiguous(),
        codes,
        exact,
        scales_B11S,
        slots_T,
        key_HNC,
        out_THD,
        num_tokens,
        q_THQ.stride(0),
        q_THQ.stride(1),
        row_TD.stride(0),
        eps,
        H=num_heads,
        N=nope_dim,
        C=latent_dim,
        F=rope_dim // 2,
        X=row_TD.shape[1] - latent_dim - rope_dim,
        WIDTH=codes.shape[-1],
        EXACT_WIDTH=exact.shape[-1],
        PARTS=parts,
        BLOCK_T=block_t,
        BLOCK_N=max(16, power_of_2(nope_dim)),
        BLOCK_C=_BLOCK_C,
        BLOCK_ROW=power_of_2(latent_dim),
        BLOCK_F=power_of_2(rope_dim // 2),
        IS_INTERLEAVED=is_interleaved,
        num_warps=4,
    )
    return out_THD


@partial(jit, do_not_specialize=["num_tokens"])
def _absorb_queries(
    q: tl.tensor,
    rows: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    codes: tl.tensor,
    exact: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
) -> None:
    """One program: the row of one token; or BLOCK_C latent features of one head's queries, for BLOCK_T tokens."""
    f = tl.arange(0, BLOCK_F)
    program = tl.program_id(0)
    if program < num_tokens:
        store_row(
            rows, norm, cos, sin, codes, exact, scales, slots, program.to(tl.int64), row_stride, eps,
            C, F, X, WIDTH, EXACT_WIDTH, BLOCK_ROW, BLOCK_F, IS_INTERLEAVED,
        )  # fmt: skip
    else:
        place = program - num_tokens
        part, head = place % PARTS, place // PARTS % H
        t = (place // (PARTS * H) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        is_t = t < num_tokens
        n, c = tl.arange(0, BLOCK_N), part * BLOCK_C + tl.arange(0, BLOCK_C)
        source = q + t[:, None] * q_token_stride + head * q_head_stride
        target = out + (t[:, None] * H + head) * (C + 2 * F)
        nope = tl.load(source + n[None, :], mask=is_t[:, None] & (n < N)[None, :], other=0.0)
        key = tl.load(
            keys + (head * N + n)[:, None] * C + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0.0
        )
        absorbed = tl.dot(nope, key, input_precision="ieee").to(out.dtype.element_ty)
        tl.store(target + c[None, :], absorbed, mask=is_t[:, None] & (c < C)[None, :])
        if part == 0:
            mask = is_t[:, None] & (f < F)[None, :]
            turn = tl.load(cos + t[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
            tilt = tl.load(sin + t[:, None] * F + f[None, :], mask=mask, other=0.0).to(tl.float32)
            turn_rows(source + N, target + C, mask, turn, tilt, F, BLOCK_F, IS_INTERLEAVED)
