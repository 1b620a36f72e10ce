"""Attention of many queries per row over its blocks: a prompt, or a chunk of one behind a prefix that is there already.

Queries are cut into tiles, which never cross rows (Dao et al. 2022, arXiv:2205.14135, over paged keys).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.eight_bits import as_bytes
from engine.kernels.language import has_fp8_casts, jit, power_of_2, tl
from engine.kernels.online_softmax import attend_block, gather_row, reference_row

_Ints = NDArray[np.int64]

# T tokens of the step, R rows, H query heads, K kv heads, G = H / K, D head_dim, B blocks, S block_size, N tiles

TILE_QUERIES = 128
_KEYS = 64  # of one step of a program


@dataclass(frozen=True)
class QueryTiles:
    """Which rows a launch computes, and how their queries are cut."""

    rows_N: Tensor  # int32, of tables and contexts
    firsts_N: Tensor  # int32, the tile's first query, counted within its row
    begins_R: Tensor  # int32, each row's first token in the step
    lengths_R: Tensor  # int32, its queries

    @classmethod
    def of(
        cls,
        begins_R: _Ints,
        lengths_R: _Ints,
        contexts_R: _Ints,
        device: torch.device,
    ) -> QueryTiles:
        """See cut_tiles."""
        arrays = (*cut_tiles(lengths_R, contexts_R), begins_R, lengths_R)
        return cls(*(torch.from_numpy(numbers.astype(np.int32)).to(device) for numbers in arrays))


def cut_tiles(lengths_R: _Ints, contexts_R: _Ints) -> tuple[_Ints, _Ints]:
    """The row and the first query of each tile (N,). Those that see the most keys come first, so that none of them
    begins when the others are done."""
    counts = -(-lengths_R // TILE_QUERIES)
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = np.concatenate([np.arange(count) * TILE_QUERIES for count in counts] or [np.zeros(0, np.int64)])
    order = np.argsort(-((contexts_R - lengths_R)[rows] + firsts), kind="stable")
    return rows[order], firsts[order]


def prefill_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tiles: QueryTiles,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    out_THD: Tensor,
) -> None:
    """softmax(q k / sqrt(D)) v of each row's queries, its last positions, over the keys not after them.

    q, out: (T, H, D) bf16, fp16 or fp32; out is written at the tiles' queries only. codes, scales: a layer of the pool,
    of 8 bits or of q's dtype; see KVPool. tables: (R, B) int32 block ids; contexts: (R,) int32 keys, the queries'
    included.
    """
    attend = launch_prefill_attention if q_THD.is_cuda else reference_prefill_attention
    attend(
        q_THD,
        codes_B2KSD,
        scales_B2KS,
        tiles=tiles,
        tables_RB=tables_RB,
        contexts_R=contexts_R,
        window=window,
        out_THD=out_THD,
    )


def reference_prefill_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tiles: QueryTiles,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    out_THD: Tensor,
) -> None:
    rows = zip(tiles.begins_R.tolist(), tiles.lengths_R.tolist(), tables_RB, contexts_R.tolist(), strict=True)
    for begin, length, table, context in rows:
        kv_2KLD = gather_row(codes_B2KSD, scales_B2KS, table, context)
        queries = slice(begin, begin + length)
        out_THD[queries] = reference_row(q_THD[queries], kv_2KLD, window=window).to(out_THD.dtype)


def launch_prefill_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tiles: QueryTiles,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    out_THD: Tensor,
) -> None:
    _, num_heads, dim = q_THD.shape
    _, _, num_kv_heads, block_size, _ = codes_B2KSD.shape
    has_scales = scales_B2KS is not None
    assert q_THD.stride(-1) == 1 and out_THD.is_contiguous() and tables_RB.stride(-1) == 1
    _attend_tile[(len(tiles.rows_N), num_heads)](
        q_THD,
        as_bytes(codes_B2KSD),
        scales_B2KS if has_scales else codes_B2KSD,
        tiles.rows_N,
        tiles.firsts_N,
        tiles.begins_R,
        tiles.lengths_R,
        tables_RB,
        contexts_R,
        out_THD,
        math.log2(math.e) / math.sqrt(dim),
        q_THD.stride(0),
        q_THD.stride(1),
        tables_RB.stride(0),
        H=num_heads,
        K=num_kv_heads,
        S=block_size,
        D=dim,
        BLOCK_M=TILE_QUERIES,
        BLOCK_N=_KEYS,
        BLOCK_D=max(16, power_of_2(dim)),
        WINDOW=window or 0,
        HAS_SCALES=has_scales,
        NATIVE=has_fp8_casts(q_THD.device),
        num_warps=8,
        num_stages=3,
    )


@partial(jit, do_not_specialize=["table_stride"])
def _attend_tile(
    q: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tile_rows: tl.tensor,
    tile_firsts: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: BLOCK_M queries of one row and one head.

    keys   lowest ........ plain ........ end       [lowest, plain): seen by every query of the tile, no mask needed
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    length, context = tl.load(lengths + row), tl.load(contexts + row)
    m, d = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    first_position = context - length + first_query
    position = context - length + m
    token = (tl.load(begins + row) + m).to(tl.int64)
    mask = (m < length)[:, None] & (d < D)[None, :]
    queries = tl.load(q + token[:, None] * q_token_stride + head * q_head_stride + d[None, :], mask=mask, other=0.0)

    end = tl.minimum(context, first_position + BLOCK_M)
    lowest = 0
    plain = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        lowest = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        plain = lowest
    table = tables + row.to(tl.int64) * table_stride
    kv_head = head // (H // K)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n in range(lowest, plain, BLOCK_N):
        result, largest, total = attend_block(
            result,
            largest,
            total,
            queries,
            position,
            n,
            end,
            codes,
            scales,
            table,
            kv_head,
            scale,
            K,
            S,
            D,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            HAS_SCALES,
            NATIVE,
            False,
        )
    for n in range(plain, end, BLOCK_N):
        result, largest, total = attend_block(
            result,
            largest,
            total,
            queries,
            position,
            n,
            end,
            codes,
            scales,
            table,
            kv_head,
            scale,
            K,
            S,
            D,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            HAS_SCALES,
            NATIVE,
            True,
        )
    total = tl.where(total == 0.0, 1.0, total)  # places behind the row's last query may see nothing
    place = (token[:, None] * H + head) * D + d[None, :]
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
