"""Scores of sparse attention over the index keys in a latent pool: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

    score_qj = sum over g of weight_qg relu(q_qg . key_j)      j: positions up to the query's own, g: index heads

Queries of one row share its keys, so they are scored in tiles: a program loads a block of keys once for all queries of
a tile. As in decode_attention, the keys of all tiles are split evenly among programs. Index keys are the last numbers
of a row, in bf16 or the pool's own dtype; see engine/kv/layout.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.attention.kv_splits import KEYS, Splits, blocks_of
from engine.kernels.attention.online_softmax import places_of
from engine.kernels.language import jit, power_of_2, tl

# Q queries, R tiles, L keys, G index heads, I numbers of an index key, B blocks, S block_size

# Queries of a tile of a prompt; a decoding row has one.
TILE_QUERIES = 16
# Scores of this size or more, and NaN, become the worst score, -MOST_SCORE. So every query has top_k best positions,
# and the search in best_positions.py begins with a finite number below all scores.
MOST_SCORE = 1e37
# Programs of this kernel that a multiprocessor runs at once.
RESIDENT = 2


def finite_scores(scores_QL: Tensor) -> Tensor:
    """Replace scores that are not finite, or nearly so, by the worst score."""
    return torch.where(scores_QL.abs() < MOST_SCORE, scores_QL, -MOST_SCORE)


def index_keys(codes_B11SD: Tensor, scales_B11S: Tensor | None, num: int) -> Tensor:
    """Return a view of the index keys of a layer, (B, 1, 1, S, num)."""
    return (codes_B11SD if scales_B11S is None else codes_B11SD.view(torch.bfloat16))[..., -num:]


def launch_index_scores(
    q_QGI: Tensor,
    weights_QG: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    *,
    tile: int,
    tables_RB: Tensor,
    contexts_R: Tensor,
    splits: Splits,
    scores_QL: Tensor,
) -> None:
    """Score the keys of each query's tile, and write them to the first columns of `scores`, (Q, L) fp32.

    q: contiguous, tile after tile. weights: fp32, contiguous. codes, scales: a layer of a latent pool whose rows end
    with index keys. tile: queries per tile. tables: (R, B) int32 block ids; may be one row, expanded.
    contexts: (R,) int32 keys of each tile; columns from there on keep their content. splits: Splits of these contexts.
    """
    num_queries, num_heads, dim = q_QGI.shape
    assert q_QGI.is_contiguous() and weights_QG.is_contiguous() and codes_B11SD.is_contiguous()
    assert tables_RB.stride(-1) == 1 and scores_QL.stride(-1) == 1
    keys = index_keys(codes_B11SD, scales_B11S, dim)
    _score_keys[(len(splits.rows_W),)](
        q_QGI,
        weights_QG,
        keys,
        tables_RB,
        contexts_R,
        splits.starts_R,
        splits.rows_W,
        scores_QL,
        num_queries,
        len(contexts_R),
        tables_RB.stride(0),
        scores_QL.stride(0),
        -MOST_SCORE,
        G=num_heads,
        I=dim,
        S=codes_B11SD.shape[3],
        WIDTH=keys.stride(3),
        TILE=tile,
        BLOCK_G=max(16, power_of_2(num_heads)),
        BLOCK_I=max(16, power_of_2(dim)),
        BLOCK_N=2 * KEYS,
        SHARED_N=KEYS,
        num_warps=4,
        num_stages=3,
    )


@partial(
    jit,
    do_not_specialize=["num_queries", "num_rows", "table_stride", "score_stride"],
    anywhere=["tables", "contexts"],
)
def _score_keys(
    q: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    scores: tl.tensor,
    num_queries: tl.tensor,
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    score_stride: tl.tensor,
    worst: tl.tensor,
    G: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    S: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_N: tl.constexpr,
) -> None:
    """One program: its share of blocks, of one or more tiles."""
    program = tl.program_id(0)
    share = tl.load(starts + num_rows + 1)
    place = program * share
    stop = tl.minimum(place + share, tl.load(starts + num_rows))
    row = tl.load(rows + program)
    i = tl.arange(0, BLOCK_I)
    while place < stop:
        context = tl.load(contexts + row)
        _, count = blocks_of(context, 1, 0, 0, SHARED_N)
        before = place - tl.load(starts + row)
        taken = tl.minimum(count - before, stop - place)
        end = tl.minimum((before + taken) * SHARED_N, context)
        table = tables + row.to(tl.int64) * table_stride
        first = row * TILE
        if TILE == 1:
            query, weight = _query(q, weights, first, G, I, BLOCK_G, BLOCK_I)
        for n in range(before * SHARED_N, end, BLOCK_N):
            position = n + tl.arange(0, BLOCK_N)
            is_key = position < end
            cell, offset = places_of(n, S, BLOCK_N)
            block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * S
            key = tl.load(
                keys + (block * WIDTH)[:, None] + (offset[:, None] * WIDTH + i[None, :]),
                mask=is_key[:, None] & (i < I)[None, :],
                other=0.0,
            ).to(q.dtype.element_ty)
            if TILE == 1:
                score = _score(query, weight, key, worst)
                tl.store(scores + first.to(tl.int64) * score_stride + position, score, mask=is_key)
            else:
                for number in range(tl.minimum(TILE, num_queries - first)):
                    at = first + number
                    query, weight = _query(q, weights, at, G, I, BLOCK_G, BLOCK_I)
                    score = _score(query, weight, key, worst)
                    tl.store(scores + at.to(tl.int64) * score_stride + position, score, mask=is_key)
        place += taken
        row += 1


@jit
def _query(
    q: tl.tensor,
    weights: tl.tensor,
    at: tl.tensor,
    G: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_G: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the heads of one query, (BLOCK_G, BLOCK_I), and their weights."""
    g, i = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_I)
    head = at.to(tl.int64) * G + g
    query = tl.load(q + head[:, None] * I + i[None, :], mask=(g < G)[:, None] & (i < I)[None, :], other=0.0)
    return query, tl.load(weights + head, mask=g < G, other=0.0)


@jit
def _score(query: tl.tensor, weight: tl.tensor, key: tl.tensor, worst: tl.tensor) -> tl.tensor:
    """Return the scores of keys (N, I), in fp32. Heads are columns, so that a thread sums many of them."""
    products = tl.dot(key, tl.trans(query), input_precision="ieee")
    score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], axis=1)
    return tl.where(tl.abs(score) < -worst, score, worst)
