"""Exact choice of the positions with the best scores, in order of position; equal scores favour the first positions.

Floats have the order of the integers that `_float_of` maps to them. So the k-th best score is found two bits at a time:
a bit is kept if at least k scores are as large. The cost depends on a row's context, not on the longest possible one.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import jit, tl

# Q queries, L keys, U chosen positions, B blocks

KEYS_AT_ONCE = 2048


def best_positions(scores_QL: Tensor, contexts_Q: Tensor, top_k: int) -> Tensor:
    """Return the best positions of each query in order, (Q, min(top_k, L)). Positions past its context come last.

    scores: finite.
    """
    places_L = torch.arange(scores_QL.shape[1], device=scores_QL.device)
    scores_QL = scores_QL.masked_fill(places_L >= contexts_Q[:, None], -torch.inf)
    num = min(top_k, scores_QL.shape[1])
    last_Q1 = scores_QL.topk(num, dim=1).values[:, -1:]
    is_above_QL, is_equal_QL = scores_QL > last_Q1, scores_QL == last_Q1
    room_Q1 = num - is_above_QL.sum(dim=1, keepdim=True)
    is_best_QL = is_above_QL | (is_equal_QL & (is_equal_QL.cumsum(dim=1) <= room_Q1))
    return is_best_QL.nonzero()[:, 1].view(-1, num)


def launch_best_slots(
    scores_QL: Tensor, contexts_Q: Tensor, tables_RB: Tensor, *, tile: int, block_size: int, top_k: int
) -> Tensor:
    """Return the places in the pool (block id * block_size + offset) of each query's best positions: (Q, U) int32.

    scores: fp32, finite, dense in L; those of queries that see at most top_k positions may be any numbers. contexts:
    (Q,) int32 positions that each query sees. tables: (R, B) int32 block ids, one row per `tile` queries; may be one
    row, expanded. U: top_k; arbitrary numbers follow the places of a query that sees fewer.
    """
    slots_QU = torch.empty(len(scores_QL), top_k, dtype=torch.int32, device=scores_QL.device)
    assert scores_QL.stride(1) == tables_RB.stride(1) == 1
    _choose_slots[(len(scores_QL),)](
        scores_QL,
        contexts_Q,
        tables_RB,
        slots_QU,
        tile,
        scores_QL.stride(0),
        tables_RB.stride(0),
        K=top_k,
        S=block_size,
        BLOCK=KEYS_AT_ONCE,
        num_warps=8,
    )
    return slots_QU


@partial(jit, do_not_specialize=["tile", "score_stride", "table_stride"], anywhere=["tables", "contexts"])
def _choose_slots(
    scores: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    slots: tl.tensor,
    tile: tl.tensor,
    score_stride: tl.tensor,
    table_stride: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one query."""
    query = tl.program_id(0).to(tl.int64)
    context = tl.load(contexts + query)
    row, table = scores + query * score_stride, tables + query // tile * table_stride
    at, i = slots + query * K, tl.arange(0, BLOCK)
    # Stands for -1.7e38, which is less than all scores; see MOST_SCORE.
    bound, room = context * 0 - 0x7F000000, context * 0 + K
    if context > K:
        bound, room = _last_of_best(row, context, bound, K, BLOCK)
    least = _float_of(bound)
    num_chosen, num_equal = context * 0, context * 0
    for first in range(0, context, BLOCK):
        n = first + i
        score = tl.load(row + n, mask=n < context, other=-float("inf"))
        is_equal = (score == least).to(tl.int32)
        is_best = ((score > least) | ((is_equal > 0) & (num_equal + tl.cumsum(is_equal, axis=0) <= room))).to(tl.int32)
        if context <= K:
            is_best = (n < context).to(tl.int32)
        place = num_chosen + tl.cumsum(is_best, axis=0) - 1
        is_stored = (is_best > 0) & (place < K)
        slot = tl.load(table + n // S, mask=is_stored, other=0) * S + n % S
        tl.store(at + place, slot, mask=is_stored)
        num_equal += tl.sum(is_equal, axis=0)
        num_chosen += tl.sum(is_best, axis=0)


@jit
def _last_of_best(
    row: tl.tensor, context: tl.tensor, bound: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return an integer (see _float_of), and the number of scores equal to its float that are among the K best.

    The float is the K-th best score, or any number that exactly K scores reach; all scores above it are among the best.
    bound: an integer below those of all scores. The row must have more than K scores.
    """
    i = tl.arange(0, BLOCK)
    step, num, num_above = context * 0 + (1 << 30), context, context * 0
    while (step > 0) & (num != K):
        one, two, three = _float_of(bound + step), _float_of(bound + 2 * step), _float_of(bound + 3 * step)
        first = tl.zeros([BLOCK], tl.int32)
        second = tl.zeros([BLOCK], tl.int32)
        third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, context, BLOCK):
            n = start + i
            score = tl.load(row + n, mask=n < context, other=-float("inf"))
            first += (score >= one).to(tl.int32)
            second += (score >= two).to(tl.int32)
            third += (score >= three).to(tl.int32)
        as_one, as_two, as_three = tl.sum(first, axis=0), tl.sum(second, axis=0), tl.sum(third, axis=0)
        if as_three >= K:
            bound, num = bound + 3 * step, as_three
        elif as_two >= K:
            bound, num, num_above = bound + 2 * step, as_two, as_three
        elif as_one >= K:
            bound, num, num_above = bound + step, as_one, as_two
        else:
            num_above = as_one
        step = step // 4
    # If exactly K scores reach `bound`, all equal ones have room.
    return bound, tl.where(num == K, K, K - num_above)


@jit
def _float_of(order: tl.tensor) -> tl.tensor:
    """Return the float of an integer, such that larger integers have larger floats."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
