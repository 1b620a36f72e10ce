"""Prefill attention over contiguous keys and values, gathered for this step.

    s_j = scale (q k_j + q' key_j)          key_j: part of the keys shared by all heads; latent layouts have one

Keys come from the pool (gather_rows.py) or were expanded from latents (latent_heads.py). Programs read them in whole
tiles, by TMA where the device has it. Queries are cut into tiles as in prefill_attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.attention.attention_rule import AttentionRule, sink_of
from engine.kernels.attention.online_softmax import weigh
from engine.kernels.attention.queries import TILE_QUERIES, QueryTiles
from engine.kernels.language import descriptor, has_tile_copies, jit, power_of_2, tl

# T tokens of the step, L keys of all rows, H query heads of this rank, K kv heads, N per-head key dim,
# P shared key dim, W value dim

# Keys per loop iteration of a program; half as many for heads wider than 128.
_KEYS = 64


@dataclass(frozen=True)
class Carry:
    """Partial results of earlier keys, for rows processed in slices. Written by all slices but the last.

    Not normalized; see online_softmax.py.
    """

    out_THW: Tensor
    largest_TH: Tensor
    total_TH: Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_heads: int, dim: int, device: torch.device) -> Carry:
        largest_TH, total_TH = torch.empty(2, num_tokens, num_heads, dtype=torch.float32, device=device)
        return cls(torch.empty(num_tokens, num_heads, dim, dtype=torch.float32, device=device), largest_TH, total_TH)


@dataclass(frozen=True)
class Slice:
    """Keys at positions [begin, end) of each row."""

    begin: int
    end: int
    is_last: bool
    # None: the only slice.
    carry: Carry | None = None


WHOLE = Slice(0, 1 << 30, is_last=True)


def launch_dense_prefill_attention(
    q_THD: Tensor,
    k_LKN: Tensor,
    shared_LP: Tensor | None,
    v_LKW: Tensor,
    *,
    tiles: QueryTiles,
    firsts_R: Tensor,
    contexts_R: Tensor,
    rule: AttentionRule,
    out_THW: Tensor,
    part: Slice = WHOLE,
) -> None:
    """Compute the attention of each row's queries, its last positions, to keys (k, shared) up to their own.

    q: (T, H, N + P); all bf16, fp16 or fp32, k, v and out contiguous, K divides H. firsts, contexts: (R,) int32; a
    row's keys of this slice start at `first` of L. rule: without window or chunk; see AttentionRule. Only the last
    slice writes out, at the tiles' queries only.
    """
    assert rule.window is None and rule.chunk is None
    num_heads, num_kv_heads = q_THD.shape[1], k_LKN.shape[1]
    nope_dim, value_dim = k_LKN.shape[2], v_LKW.shape[2]
    rope_dim = 0 if shared_LP is None else shared_LP.shape[1]
    assert q_THD.stride(-1) == 1 and k_LKN.is_contiguous() and v_LKW.is_contiguous() and out_THW.is_contiguous()
    blocks = {"BLOCK_N": max(16, power_of_2(nope_dim)), "BLOCK_P": max(16, power_of_2(rope_dim or 1))}
    blocks["BLOCK_W"] = max(16, power_of_2(value_dim))
    # Two programs share a multiprocessor's memory.
    is_wide = blocks["BLOCK_W"] > 128
    keys = _KEYS // 2 if is_wide else _KEYS
    # TMA copies need tiles whose columns are exactly one head; others would include columns of the next head.
    is_tiled = has_tile_copies(q_THD.device) and q_THD.dtype != torch.float32
    is_tiled &= (nope_dim, value_dim) == (blocks["BLOCK_N"], blocks["BLOCK_W"])
    # Shared keys may be columns of wider rows; TMA needs them aligned to 16 bytes.
    if shared_LP is not None:
        starts = shared_LP.stride(0), shared_LP.storage_offset()
        is_tiled &= rope_dim == blocks["BLOCK_P"] and all(start % 8 == 0 for start in starts)
    k_LN, v_LW = k_LKN.view(len(k_LKN), -1), v_LKW.view(len(v_LKW), -1)
    shared_LP = k_LN if shared_LP is None else shared_LP
    sources: tuple[Any, ...] = (k_LN, shared_LP, v_LW)
    if is_tiled:
        widths = (nope_dim, rope_dim or nope_dim, value_dim)
        sources = tuple(descriptor(x, [keys, width]) for x, width in zip(sources, widths, strict=True))
    carry = part.carry
    nothing = q_THD.new_empty(1, dtype=torch.float32)
    _attend_tile[(len(tiles.rows_N), num_heads)](
        q_THD,
        *sources,
        tiles.rows_N,
        tiles.firsts_N,
        tiles.begins_R,
        tiles.lengths_R,
        firsts_R,
        contexts_R,
        rule.sinks_H,
        out_THW,
        *((carry.out_THW, carry.largest_TH, carry.total_TH) if carry else (nothing, nothing, nothing)),
        rule.factor,
        part.begin,
        part.end,
        int(part.is_last),
        q_THD.stride(0),
        q_THD.stride(1),
        k_LN.stride(0),
        shared_LP.stride(0),
        v_LW.stride(0),
        H=num_heads,
        K=num_kv_heads,
        N=nope_dim,
        P=rope_dim,
        W=value_dim,
        BLOCK_M=TILE_QUERIES,
        BLOCK_L=keys,
        **blocks,
        CAP=rule.constants["CAP"],
        IS_TILED=is_tiled,
        num_warps=4,
        num_stages=2 if rope_dim or is_wide else 3,
    )


@partial(jit, do_not_specialize=["begin", "end", "is_last"])
def _attend_tile(
    q: tl.tensor,
    k: tl.tensor,
    shared: tl.tensor,
    v: tl.tensor,
    tile_rows: tl.tensor,
    tile_firsts: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    key_firsts: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    carried: tl.tensor,
    carried_largest: tl.tensor,
    carried_total: tl.tensor,
    scale: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    is_last: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_stride: tl.tensor,
    shared_stride: tl.tensor,
    v_stride: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CAP: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> None:
    """One program: BLOCK_M queries of one row and one head.

    keys   begin ........ plain ........ end       [begin, plain): seen by every query of the tile, no mask needed
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    length, context = tl.load(lengths + row), tl.load(contexts + row)
    m, w = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_W)
    position = context - length + m
    is_query = (m < length)[:, None]
    token = (tl.load(begins + row) + m).to(tl.int64)
    i, p = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P)
    query = q + token[:, None] * q_token_stride + head * q_head_stride
    q_own = tl.load(query + i[None, :], mask=is_query & (i < N)[None, :], other=0.0)
    q_shared = q_own
    if P > 0:
        q_shared = tl.load(query + N + p[None, :], mask=is_query & (p < P)[None, :], other=0.0)

    kv_head = head // (H // K)
    first_key = tl.load(key_firsts + row) - begin
    end = tl.minimum(tl.minimum(context, end), context - length + first_query + BLOCK_M)
    # Keys that every query of the tile sees.
    seen = tl.minimum(context - length + first_query + 1, end)
    plain = begin + tl.maximum(seen - begin, 0) // BLOCK_L * BLOCK_L
    place = token * H + head
    mask = is_query & (w < W)[None, :]
    is_carried = m < tl.where(begin > 0, length, 0)
    total = tl.load(carried_total + place, mask=is_carried, other=0.0)
    largest = tl.load(carried_largest + place, mask=is_carried, other=-float("inf"))
    result = tl.load(carried + place[:, None] * W + w[None, :], mask=is_carried[:, None] & (w < W)[None, :], other=0.0)
    if sinks is not None:
        largest = tl.where(begin > 0, largest, sink_of(sinks, head))
        total = tl.where(begin > 0, total, 1.0)
    for n in range(begin, plain, BLOCK_L):
        result, largest, total = _step(
            result, largest, total, q_own, q_shared, k, shared, v, first_key + n, n, kv_head, position, end, scale,
            k_stride, shared_stride, v_stride, N, P, W, BLOCK_L, BLOCK_N, BLOCK_P, BLOCK_W, CAP, IS_TILED, False,
        )  # fmt: skip
    for n in range(plain, end, BLOCK_L):
        result, largest, total = _step(
            result, largest, total, q_own, q_shared, k, shared, v, first_key + n, n, kv_head, position, end, scale,
            k_stride, shared_stride, v_stride, N, P, W, BLOCK_L, BLOCK_N, BLOCK_P, BLOCK_W, CAP, IS_TILED, True,
        )  # fmt: skip
    if is_last != 0:
        # Positions past the row's last query have no keys.
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(out + place[:, None] * W + w[None, :], (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(carried + place[:, None] * W + w[None, :], result, mask=mask)
        tl.store(carried_largest + place, largest, mask=m < length)
        tl.store(carried_total + place, total, mask=m < length)


@jit
def _step(
    result: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    q_own: tl.tensor,
    q_shared: tl.tensor,
    k: tl.tensor,
    shared: tl.tensor,
    v: tl.tensor,
    at: tl.tensor,
    n: tl.tensor,
    head: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    k_stride: tl.tensor,
    shared_stride: tl.tensor,
    v_stride: tl.tensor,
    N: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CAP: tl.constexpr,
    IS_TILED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Accumulate keys n, n + 1, …, which start at place `at`."""
    key = n + tl.arange(0, BLOCK_L)
    is_key = (key < end) if MASKED else tl.full([BLOCK_L], True, tl.int1)
    scores = tl.dot(
        q_own, _tile(k, at, head, k_stride, is_key, N, BLOCK_L, BLOCK_N, IS_TILED).T, input_precision="ieee"
    )
    if P > 0:
        k_shared = _tile(shared, at, 0, shared_stride, is_key, P, BLOCK_L, BLOCK_P, IS_TILED)
        scores = tl.dot(q_shared, k_shared.T, scores, input_precision="ieee")
    is_seen = (key[None, :] <= position[:, None]) & is_key[None, :]
    grown, fade, weights = weigh(scores, largest, is_seen, scale, CAP, MASKED)
    total = total * fade + tl.sum(weights, axis=1)
    values = _tile(v, at, head, v_stride, is_key, W, BLOCK_L, BLOCK_W, IS_TILED)
    if MASKED and IS_TILED:
        # Masked lanes may hold NaN.
        values = tl.where(is_key[:, None], values, 0.0)
    weights = weights.to(values.dtype)
    if P > 0:
        # If the third product accumulated into the last iteration's sum, ptxas (C7515) would serialize all products.
        fades = tl.broadcast_to(fade[:, None], result.shape)
        result = tl.fma(result, fades, tl.dot(weights, values, input_precision="ieee"))
    else:
        result = tl.dot(weights, values, result * fade[:, None], input_precision="ieee")
    return result, grown, total


@jit
def _tile(
    source: tl.tensor,
    at: tl.tensor,
    head: tl.tensor,
    stride: tl.tensor,
    is_key: tl.tensor,
    D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_TILED: tl.constexpr,
) -> tl.tensor:
    """Load (BLOCK_L, BLOCK_D) of one head from place `at` on; a TMA tile has garbage past the last key."""
    if IS_TILED:
        tile = source.load([at, head * D])
    else:
        rows, d = at.to(tl.int64) + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_D)
        mask = is_key[:, None] & (d < D)[None, :]
        tile = tl.load(source + rows[:, None] * stride + (head * D + d[None, :]), mask=mask, other=0.0)
    return tile
