"""Kernels over logits. Sampling: the next token of each row, greedy or drawn, in one launch without a sync.

    z = (greatest - x) / temperature      w = exp(-z)      kept: z <= limit, the least limit of top-k, top-p and min-p
    the first token, in the order of ids, at which the running sum of kept w exceeds draw * their total

Nothing is sorted: non-negative floats order like their bits, so a limit is found by narrowing an interval of bits, each
time to a quarter, or to the range of its values. The reference is the sampler's torch path, which accumulates in fp64;
this kernel uses fp32 in an order that depends on the vocabulary size only.

Log-sum-exp: ln sum(exp(x)) of each row, in fp32. A row's result does not depend on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import jit, tl

# R rows, V vocabulary

# Per sampling row: temperature (0: greedy), top-k, top-p, ln(min-p), and the draw in two parts.
NUM_NUMBERS = 6
# Bits of each part of the draw.
DRAW_BITS = 24
# Error codes in place of a token: all logits are -inf; a logit is infinite or NaN.
NO_LOGIT_IS_FINITE, NOT_FINITE = -2, -1
# Logits of a row that its program reads at a time.
_BLOCK, _NUM_WARPS = 4096, 16


def launch_choice(logits_RV: Tensor, numbers_R6: Tensor | None, *, block: int = _BLOCK) -> Tensor:
    """Return (R,) int32: tokens, or error codes. logits_RV: fp32, dense in V.

    numbers_R6: int32; see NUM_NUMBERS. Fractions are fp32 bits; top-k 0 disables it. None: all rows are greedy.
    """
    num_rows, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1 and logits_RV.dtype is torch.float32
    chosen_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    _choose[(num_rows,)](
        logits_RV,
        numbers_R6,
        chosen_R,
        logits_RV.stride(0),
        vocabulary,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
    return chosen_R


@jit
def _choose(
    logits: tl.tensor,
    numbers: tl.tensor,
    chosen: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.full((BLOCK,), 0, tl.int32)
    is_odd = tl.full((BLOCK,), 0, tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        x = tl.load(logits + begin + i, mask=begin + i < vocabulary, other=float("-inf"))
        is_odd |= ((x != x) | (x == float("inf"))).to(tl.int32)
        place = tl.where(x > best, begin + i, place)
        best = tl.where(x > best, x, best)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, place, vocabulary), axis=0)
    if tl.max(is_odd, axis=0) > 0:
        token = token * 0 - 1
    elif most == float("-inf"):
        token = token * 0 - 2
    elif numbers is not None:
        numbers += row * 6
        temperature = tl.load(numbers).to(tl.float32, bitcast=True)
        if temperature > 0.0:
            token = _draw(logits, numbers, vocabulary, most, temperature, token, BLOCK)
    tl.store(chosen + row, token)


@jit
def _draw(
    logits: tl.tensor,
    numbers: tl.tensor,
    vocabulary: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    likeliest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    top_k = tl.load(numbers + 1)
    top_p = tl.load(numbers + 2).to(tl.float32, bitcast=True)
    least = tl.load(numbers + 3).to(tl.float32, bitcast=True)
    draw = (tl.load(numbers + 4).to(tl.float64) * 16777216.0 + tl.load(numbers + 5).to(tl.float64)) / 281474976710656.0
    # Exclusive upper bound of the kept bits: infinity.
    end = most.to(tl.int32, bitcast=True) * 0 + 0x7F800000
    if top_k > 0:
        end = _limit(logits, vocabulary, most, temperature, top_k.to(tl.float32), end, False, BLOCK)
    if top_p < 1.0:
        goal = _mass(logits, vocabulary, most, temperature, end, BLOCK) * top_p
        end = _limit(logits, vocabulary, most, temperature, goal, end, True, BLOCK)
    if least > float("-inf"):
        end = tl.minimum(end, (0.0 - least).to(tl.int32, bitcast=True) + 1)
    target = _mass(logits, vocabulary, most, temperature, end, BLOCK).to(tl.float64) * draw
    i = tl.arange(0, BLOCK)
    before, begin, token, is_found = target * 0.0, vocabulary * 0, likeliest, vocabulary * 0
    while (begin < vocabulary) & (is_found == 0):
        w = _weights(logits, begin + i, vocabulary, most, temperature, end)
        total = tl.sum(w, axis=0).to(tl.float64)
        if total > 0.0:
            # Rounding may keep the last tile below the target: use the last kept token.
            token = tl.max(tl.where(w > 0.0, begin + i, -1), axis=0)
        if before + total > target:
            missing = (target - before).to(tl.float32)
            is_above = (tl.cumsum(w, axis=0) > missing) & (w > 0.0)
            token = tl.min(tl.where(is_above, begin + i, token), axis=0)
            is_found += 1
        before += total
        begin += BLOCK
    return token


@jit
def _limit(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    goal: tl.tensor,
    end: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the least exclusive bound on the bits of z below which tokens reach the goal, by count or by mass.

    The bound is at most `end`.
    """
    i = tl.arange(0, BLOCK)
    # Tokens below `low` do not reach the goal.
    low, high, reached = end * 0, end, goal * 0.0
    while high - low > 1:
        quarter = (high - low + 3) // 4
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        a = tl.full((BLOCK,), 0.0, tl.float32)
        b = tl.full((BLOCK,), 0.0, tl.float32)
        c = tl.full((BLOCK,), 0.0, tl.float32)
        nearest = tl.full((BLOCK,), 0x7F800000, tl.int32)
        farthest = tl.full((BLOCK,), 0, tl.int32)
        for begin in range(0, vocabulary, BLOCK):
            z = _distances(logits, begin + i, vocabulary, most, temperature)
            bits = z.to(tl.int32, bitcast=True)
            w = tl.exp(-z) if BY_MASS else tl.full((BLOCK,), 1.0, tl.float32)
            w = tl.where(bits >= low, w, 0.0)
            a += tl.where(bits < first, w, 0.0)
            b += tl.where(bits < second, w, 0.0)
            c += tl.where(bits < third, w, 0.0)
            nearest = tl.minimum(nearest, tl.where(bits >= low, bits, 0x7F800000))
            farthest = tl.maximum(farthest, tl.where(bits < high, bits, 0))
        in_first, in_second, in_third = tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0)
        low, high = tl.maximum(low, tl.min(nearest, axis=0)), tl.minimum(high, tl.max(farthest, axis=0) + 1)
        if reached + in_first >= goal:
            high = tl.minimum(high, first)
        elif reached + in_second >= goal:
            low, high, reached = tl.maximum(low, first), tl.minimum(high, second), reached + in_first
        elif reached + in_third >= goal:
            low, high, reached = tl.maximum(low, second), tl.minimum(high, third), reached + in_second
        else:
            low, reached = tl.maximum(low, third), reached + in_third
    return tl.maximum(high, low + 1)


@jit
def _mass(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    most: tl.tensor,
    temperature: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    i = tl.arange(0, BLOCK)
    w = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        w += _weights(logits, begin + i, vocabulary, most, temperature, end)
    return tl.sum(w, axis=0)


@jit
def _weights(
    logits: tl.tensor, i: tl.tensor, vocabulary: tl.tensor, most: tl.tensor, temperature: tl.tensor, end: tl.tensor
) -> tl.tensor:
    z = _distances(logits, i, vocabulary, most, temperature)
    return tl.where(z.to(tl.int32, bitcast=True) < end, tl.exp(-z), 0.0)


@jit
def _distances(
    logits: tl.tensor, i: tl.tensor, vocabulary: tl.tensor, most: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Return z. It is non-negative, so its bits order like its values."""
    x = tl.load(logits + i, mask=i < vocabulary, other=float("-inf"))
    return (most - x) / temperature


def launch_log_norms(logits_RV: Tensor) -> Tensor:
    """Return log-sum-exp (R, 1) fp32, not finite where logits are not. logits_RV: fp32, dense in V."""
    num_rows, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1 and logits_RV.dtype is torch.float32
    norms_R1 = torch.empty(num_rows, 1, dtype=torch.float32, device=logits_RV.device)
    _log_norm[(num_rows,)](logits_RV, norms_R1, logits_RV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return norms_R1


@jit
def _log_norm(
    logits: tl.tensor, norms: tl.tensor, row_stride: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        best = tl.maximum(best, tl.load(logits + begin + i, mask=begin + i < vocabulary, other=float("-inf")))
    most = tl.max(best, axis=0)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        is_there = begin + i < vocabulary
        x = tl.load(logits + begin + i, mask=is_there, other=0.0)
        # inf - inf is NaN, which makes the sum NaN as intended.
        total += tl.where(is_there, tl.exp(x - most), 0.0)
    tl.store(norms + row, most + tl.log(tl.sum(total, axis=0)))
