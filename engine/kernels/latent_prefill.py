"""Latent attention of many queries per row, over keys and values that were made from the row's latents for this step.

    s_j = (q_nope . k_j + q_rope . key_j) scale          key_j: the rotated key, one for all heads

Expanded, a key costs N + P products for each query and head where the row itself would cost C + P: see latent_heads.py.
Queries are cut into tiles as in prefill_attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl
from engine.kernels.prefill_attention import TILE_QUERIES, QueryTiles

# T tokens of the step, L keys of all rows, H query heads of this rank, N nope_dim, P rope_dim, W value_dim

_KEYS = 64  # of one step of a program


def latent_prefill_attention(
    q_THD: Tensor,
    k_LHN: Tensor,
    keys_LP: Tensor,
    v_LHW: Tensor,
    *,
    tiles: QueryTiles,
    firsts_R: Tensor,
    contexts_R: Tensor,
    scale: float,
    out_THW: Tensor,
) -> None:
    """softmax(q (k, key) scale) v of each row's queries, its last positions, over the keys not after them.

    q: (T, H, N + P); all bf16, fp16 or fp32, k, v and out contiguous. A row's keys are [first, first + context) of L;
    firsts, contexts: (R,) int32. out is written at the tiles' queries only.
    """
    attend = launch_latent_prefill_attention if q_THD.is_cuda else reference_latent_prefill_attention
    attend(
        q_THD,
        k_LHN,
        keys_LP,
        v_LHW,
        tiles=tiles,
        firsts_R=firsts_R,
        contexts_R=contexts_R,
        scale=scale,
        out_THW=out_THW,
    )


def reference_latent_prefill_attention(
    q_THD: Tensor,
    k_LHN: Tensor,
    keys_LP: Tensor,
    v_LHW: Tensor,
    *,
    tiles: QueryTiles,
    firsts_R: Tensor,
    contexts_R: Tensor,
    scale: float,
    out_THW: Tensor,
) -> None:
    rows = (tiles.begins_R, tiles.lengths_R, firsts_R, contexts_R)
    for begin, length, first, context in zip(*(numbers.tolist() for numbers in rows), strict=True):
        queries, keys = slice(begin, begin + length), slice(first, first + context)
        shared_LHP = keys_LP[keys].unsqueeze(1).expand(-1, k_LHN.shape[1], -1)
        k_LHD = torch.cat((k_LHN[keys], shared_LHP), dim=-1).float()
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[queries].float(), k_LHD) * scale
        is_hidden_QL = torch.ones_like(scores_HQL[0], dtype=torch.bool).triu(context - length + 1)
        weights_HQL = scores_HQL.masked_fill(is_hidden_QL, -torch.inf).softmax(-1)
        out_THW[queries] = torch.einsum("hql,lhw->qhw", weights_HQL, v_LHW[keys].float()).to(out_THW.dtype)


def launch_latent_prefill_attention(
    q_THD: Tensor,
    k_LHN: Tensor,
    keys_LP: Tensor,
    v_LHW: Tensor,
    *,
    tiles: QueryTiles,
    firsts_R: Tensor,
    contexts_R: Tensor,
    scale: float,
    out_THW: Tensor,
) -> None:
    num_heads, (nope_dim, rope_dim, value_dim) = q_THD.shape[1], (x.shape[-1] for x in (k_LHN, keys_LP, v_LHW))
    assert q_THD.stride(-1) == keys_LP.stride(-1) == 1
    assert k_LHN.is_contiguous() and v_LHW.is_contiguous() and out_THW.is_contiguous()
    _attend_tile[(len(tiles.rows_N), num_heads)](
        q_THD,
        k_LHN,
        keys_LP,
        v_LHW,
        tiles.rows_N,
        tiles.firsts_N,
        tiles.begins_R,
        tiles.lengths_R,
        firsts_R,
        contexts_R,
        out_THW,
        scale * math.log2(math.e),
        q_THD.stride(0),
        q_THD.stride(1),
        keys_LP.stride(0),
        H=num_heads,
        N=nope_dim,
        P=rope_dim,
        W=value_dim,
        BLOCK_M=TILE_QUERIES,
        BLOCK_L=_KEYS,
        BLOCK_N=max(16, power_of_2(nope_dim)),
        BLOCK_P=max(16, power_of_2(rope_dim)),
        BLOCK_W=max(16, power_of_2(value_dim)),
        num_warps=8,
        num_stages=2,
    )


@jit
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
    out: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    shared_stride: tl.tensor,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: BLOCK_M queries of one row and one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    length, context = tl.load(lengths + row), tl.load(contexts + row)
    m = first_query + tl.arange(0, BLOCK_M)
    position = context - length + m
    is_query = (m < length)[:, None]
    token = (tl.load(begins + row) + m).to(tl.int64)
    i, p, w = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_W)
    query = q + token[:, None] * q_token_stride + head * q_head_stride
    q_nope = tl.load(query + i[None, :], mask=is_query & (i < N)[None, :], other=0.0)
    q_rope = tl.load(query + N + p[None, :], mask=is_query & (p < P)[None, :], other=0.0)

    first_key = tl.load(key_firsts + row).to(tl.int64)
    end = tl.minimum(context, context - length + first_query + BLOCK_M)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_W], tl.float32)
    for start in range(0, end, BLOCK_L):
        n = start + tl.arange(0, BLOCK_L)
        is_key = n < end
        key = first_key + n
        own = (key * H + head)[None, :] * N + i[:, None]
        k_nope = tl.load(k + own, mask=is_key[None, :] & (i < N)[:, None], other=0.0)
        k_rope = tl.load(
            shared + key[None, :] * shared_stride + p[:, None], mask=is_key[None, :] & (p < P)[:, None], other=0.0
        )
        scores = tl.dot(q_nope, k_nope, input_precision="ieee")
        scores = tl.dot(q_rope, k_rope, scores, input_precision="ieee") * scale
        # Every query sees the first key, so that `grown` is a number from the first step on.
        scores = tl.where((n[None, :] <= position[:, None]) & is_key[None, :], scores, -float("inf"))
        grown = tl.maximum(largest, tl.max(scores, axis=1))
        fade = tl.exp2(largest - grown)
        weights = tl.exp2(scores - grown[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        values = tl.load(
            v + (key * H + head)[:, None] * W + w[None, :], mask=is_key[:, None] & (w < W)[None, :], other=0.0
        )
        result = tl.dot(weights.to(values.dtype), values, result * fade[:, None], input_precision="ieee")
        largest = grown
    target = out + (token[:, None] * H + head) * W + w[None, :]
    tl.store(target, (result / total[:, None]).to(out.dtype.element_ty), mask=is_query & (w < W)[None, :])
