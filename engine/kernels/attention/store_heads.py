"""Fused kernel from a layer's projection to its queries, with keys and values stored in the pool.

    q_h = rotate(norm(q_h))      k_h = rotate(norm(k_h))      v_h as is          norm: if the model has one

Keys and values are quantized if the pool has scales. Rounds as rms_norm.py, rotary.py and kv_write.py do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention.kv_write import reference_write_kv, store_rows
from engine.kernels.attention.rotary import reference_rotate
from engine.kernels.language import jit, power_of_2, tl
from engine.kernels.quant.row_quantization import INT4, as_bytes
from engine.kernels.rms_norm import reference_rms_norm

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2, B blocks, S block_size


class HeadNorms(NamedTuple):
    """RMSNorm weights of heads, applied before the rotation."""

    q_D: Tensor
    k_D: Tensor
    eps: float


def store_heads(
    heads_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    slots_T: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    """Store keys and values at `slots_T`, and return the queries (T, H, D), contiguous.

    heads: (T, N, D), dense in D: queries, then keys, then values. cos, sin: (T, 1, F) of the same dtype. codes, scales,
    slots: as in write_kv; a negative slot stores nothing.
    """
    store = launch_store_heads if heads_TND.is_cuda else reference_store_heads
    return store(heads_TND, cos_T1F, sin_T1F, codes_B2KSD, scales_B2KS, slots_T, norms)


def reference_store_heads(
    heads_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    slots_T: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    num_kv = codes_B2KSD.shape[2]
    q_THD, k_TKD, v_TKD = heads_TND.tensor_split((-2 * num_kv, -num_kv), dim=1)
    if norms is not None:
        q_THD, k_TKD = (reference_rms_norm(x, w, norms.eps) for x, w in ((q_THD, norms.q_D), (k_TKD, norms.k_D)))
    reference_write_kv(codes_B2KSD, scales_B2KS, slots_T, reference_rotate(k_TKD, cos_T1F, sin_T1F), v_TKD)
    return reference_rotate(q_THD, cos_T1F, sin_T1F)


def launch_store_heads(
    heads_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    slots_T: Tensor,
    norms: HeadNorms | None,
) -> Tensor:
    num_tokens, num_heads, dim = heads_TND.shape
    _, _, num_kv, block_size, _ = codes_B2KSD.shape
    num_q = num_heads - 2 * num_kv
    assert heads_TND.stride(-1) == 1 and codes_B2KSD.is_contiguous() and num_q % num_kv == 0
    q_THD = torch.empty(num_tokens, num_q, dim, dtype=heads_TND.dtype, device=heads_TND.device)
    group, block_d = num_q // num_kv, power_of_2(dim)
    _store_heads[(num_tokens, num_kv)](
        heads_TND,
        cos_T1F.contiguous(),
        sin_T1F.contiguous(),
        norms.q_D if norms else heads_TND,
        norms.k_D if norms else heads_TND,
        as_bytes(codes_B2KSD),
        codes_B2KSD if scales_B2KS is None else scales_B2KS,
        slots_T,
        q_THD,
        heads_TND.stride(0),
        heads_TND.stride(1),
        norms.eps if norms else 0.0,
        G=group,
        K=num_kv,
        S=block_size,
        D=dim,
        BLOCK_G=power_of_2(group),
        BLOCK_D=block_d,
        HAS_NORMS=norms is not None,
        HAS_SCALES=scales_B2KS is not None,
        IS_INT4=codes_B2KSD.dtype == INT4,
        num_warps=max(1, min(4, power_of_2(group) * block_d // 512)),
    )
    return q_THD


@jit
def _store_heads(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    q_out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    eps: tl.tensor,
    G: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """One program: one kv head of one token, and the G query heads that share it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, one, d = tl.arange(0, BLOCK_G), tl.arange(0, 1), tl.arange(0, BLOCK_D)
    f = d % (D // 2)
    c = tl.load(cos + token * (D // 2) + f, mask=d < D, other=0.0).to(tl.float32)
    s = tl.load(sin + token * (D // 2) + f, mask=d < D, other=0.0).to(tl.float32)
    s = tl.where(d < D // 2, -s, s)
    row = heads + token * token_stride

    queries = head * G + g
    is_query = (g < G)[:, None] & (d < D)[None, :]
    q = _turned(row + queries[:, None] * head_stride, is_query, q_weight, c, s, eps, D, BLOCK_D, HAS_NORMS)
    q_target = q_out + (token * K * G + queries)[:, None] * D + d[None, :]
    tl.store(q_target, q, mask=is_query)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        is_key = (one[:, None] == 0) & (d < D)[None, :]
        k_row = row + (K * G + head + one[:, None]) * head_stride
        k = _turned(k_row, is_key, k_weight, c, s, eps, D, BLOCK_D, HAS_NORMS)
        v = tl.load(k_row + K * head_stride + d[None, :], mask=is_key, other=0.0)
        place = (slot // S * 2 * K + head) * S + slot % S + one[:, None]
        is_row = one[:, None] == 0
        store_rows(k, is_key, is_row, codes, scales, place, D, HAS_SCALES, IS_INT4)
        store_rows(v, is_key, is_row, codes, scales, place + K * S, D, HAS_SCALES, IS_INT4)


@jit
def _turned(
    rows: tl.tensor,
    mask: tl.tensor,
    weight: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """Load heads at `rows` (N, 1), norm and rotate them: (N, BLOCK_D). s: negative in the first half."""
    d = tl.arange(0, BLOCK_D)
    # Index of each number's partner in its rotary pair.
    other = tl.where(d < D // 2, d + D // 2, d - D // 2)
    x = tl.load(rows + d[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    y = tl.load(rows + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        x_weight = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y_weight = tl.load(weight + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    return (x * c[None, :] + y * s[None, :]).to(dtype)
