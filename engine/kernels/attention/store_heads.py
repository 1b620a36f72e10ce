"""Fused kernel from a layer's projection to its queries, with keys and values stored in the pool.

    q_h = rotate(norm(q_h))      k_h = rotate(norm(k_h))      v_h = norm(v_h)          norm: if the model has one

Keys and values are quantized if the pool has scales. Rounds as rms_norm.py, rotary.py and kv_write.py do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention.kv_write import store_rows
from engine.kernels.language import jit, power_of_2, tl
from engine.kernels.quant.row_quantization import INT4, as_bytes

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F half of the rotated part, B blocks,
# S block_size


class HeadNorms(NamedTuple):
    """RMSNorm weights of heads, applied before the rotation; None: no norm."""

    q_D: Tensor | None = None
    k_D: Tensor | None = None
    v_D: Tensor | None = None
    eps: float = 0.0


def launch_store_heads(
    heads_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    slots_T: Tensor,
    norms: HeadNorms,
) -> Tensor:
    """Store keys and values at `slots_T`, and return the queries (T, H, D), contiguous.

    heads: (T, N, D), dense in D: queries, then keys, then values. cos, sin: (T, 1, F) of the same dtype. codes, scales,
    slots: as in write_kv; a negative slot stores nothing.
    """
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
        *norms[:3],
        as_bytes(codes_B2KSD),
        scales_B2KS,
        slots_T,
        q_THD,
        heads_TND.stride(0),
        heads_TND.stride(1),
        norms.eps,
        G=group,
        K=num_kv,
        S=block_size,
        D=dim,
        F=cos_T1F.shape[-1],
        BLOCK_G=power_of_2(group),
        BLOCK_D=block_d,
        IS_INT4=codes_B2KSD.dtype == INT4,
        num_warps=max(1, min(8, power_of_2(group) * block_d // 512)),
    )
    return q_THD


@jit
def _store_heads(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    v_weight: tl.tensor,
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
    F: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """One program: one kv head of one token, and the G query heads that share it."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, one, d = tl.arange(0, BLOCK_G), tl.arange(0, 1), tl.arange(0, BLOCK_D)
    c, s = 1.0, 0.0
    if F > 0:
        f = d % F
        c = tl.load(cos + token * F + f, mask=d < 2 * F, other=0.0 if 2 * F == D else 1.0).to(tl.float32)
        s = tl.load(sin + token * F + f, mask=d < 2 * F, other=0.0).to(tl.float32)
        s = tl.where(d < F, -s, s)
    row = heads + token * token_stride

    queries = head * G + g
    is_query = (g < G)[:, None] & (d < D)[None, :]
    q = _turned(row + queries[:, None] * head_stride, is_query, q_weight, c, s, eps, D, F, BLOCK_D)
    q_target = q_out + (token * K * G + queries)[:, None] * D + d[None, :]
    tl.store(q_target, q, mask=is_query)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        is_key = (one[:, None] == 0) & (d < D)[None, :]
        k_row = row + (K * G + head + one[:, None]) * head_stride
        k = _turned(k_row, is_key, k_weight, c, s, eps, D, F, BLOCK_D)
        v = _turned(k_row + K * head_stride, is_key, v_weight, c, s, eps, D, 0, BLOCK_D)
        place = (slot // S * 2 * K + head) * S + slot % S + one[:, None]
        is_row = one[:, None] == 0
        store_rows(k, is_key, is_row, codes, scales, place, D, IS_INT4)
        store_rows(v, is_key, is_row, codes, scales, place + K * S, D, IS_INT4)


@jit
def _turned(
    rows: tl.tensor,
    mask: tl.tensor,
    weight: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Load heads at `rows` (N, 1), norm and rotate them: (N, BLOCK_D). s: sines, negated in the first half.

    F: features [0, 2 F) rotate.
    """
    d = tl.arange(0, BLOCK_D)
    numbers = tl.load(rows + d[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = numbers.dtype
    x = numbers.to(tl.float32)
    # Index of each number's partner in its rotary pair.
    other = tl.where(d < F, d + F, d - F)
    if 2 * F < D:
        other = tl.where(d < 2 * F, other, d)
    y = x
    if F > 0:
        y = tl.load(rows + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
        x = _weighed(x * scale, tl.load(weight + d, mask=d < D, other=0.0), dtype)
        if F > 0:
            y = _weighed(y * scale, tl.load(weight + other, mask=d < D, other=0.0), dtype)
    # Triton also compiles what follows a return.
    if F > 0:
        x = x * c[None, :] + y * s[None, :]
    return x.to(dtype)


@jit
def _weighed(x: tl.tensor, weight: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Multiply by a norm's weight, with the roundings of rms_norm.py."""
    if weight.dtype != tl.float32:
        x = x.to(dtype).to(tl.float32)
    return (x * weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
