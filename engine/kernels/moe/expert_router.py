"""Fused MoE router for decode steps: logits, choice of experts, and sorting into tiles, in one kernel.

    logits = x @ weight.T + bias          chosen, weights = choose(logits)          tiles = sorted(chosen)

See top_k.py and expert_tiles.py. Programs split the outputs and inputs of the product and write partial sums. The last
program of a token tile adds them up in order and chooses its experts; the very last program sorts. Counters are reset
to zero. A token's result does not depend on other tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.moe.expert_tiles import Tiles, new_tiles, rows_of_tiles
from engine.kernels.moe.top_k import (
    TINY,
    ChoiceRule,
    choose,
    constants,
    experts_of_places,
    new_choices,
)

# T tokens, E hidden_size, X experts to choose from, L logits: X, optionally one more, C experts per token

MOST_TOKENS = 64
# Tokens whose experts are chosen at once.
_ROWS = 16
# Outputs per program, and inputs per loop iteration.
_OUTPUTS, _DEPTH = 64, 128
# Minimum inputs per program, and maximum programs that split the inputs.
_LEAST_INPUTS, _MOST_SPLITS = 256, 16
# Experts sorted at a time.
_SORTED = 64


class RoutedTokens(NamedTuple):
    """Chosen experts of each token."""

    chosen_TC: Tensor  # int64
    weights_TC: Tensor  # fp32
    # Tiles of `chosen`, if already sorted.
    tiles: Tiles | None = None


def new_counters(device: torch.device) -> Tensor:
    """Return the counters of one router: zero between launches. Two streams must not use them concurrently."""
    return torch.zeros(MOST_TOKENS // _ROWS + 1, dtype=torch.int32, device=device)


def launch_route(
    x_TE: Tensor,
    weight_LE: Tensor,
    bias_X: Tensor | None,
    counters: Tensor,
    rule: ChoiceRule,
    *,
    is_exact: bool,
    logit_bias_L: Tensor | None = None,
    factors_X: Tensor | None = None,
) -> RoutedTokens:
    """Choose experts. x: at most MOST_TOKENS rows. weight: contiguous.

    is_exact: keep logits in fp32, in which they are summed; otherwise round them to x's dtype. logit_bias: of the
    weight's dtype. bias, factors: see reference_choose_experts.
    """
    (num_tokens, num_inputs), num_logits = x_TE.shape, len(weight_LE)
    x_TE, device = x_TE.contiguous(), x_TE.device
    assert weight_LE.is_contiguous() and num_tokens <= MOST_TOKENS
    chosen_TC, weights_TC = new_choices(num_tokens, rule, device)
    if not num_tokens:
        return RoutedTokens(chosen_TC, weights_TC)
    num_experts = num_logits - rule.weighs_shared + rule.num_shared
    rows = rows_of_tiles(chosen_TC.numel(), num_experts, most=MOST_TOKENS)
    tiles = new_tiles(chosen_TC.numel(), num_experts, rows, device)
    splits = max(1, min(_MOST_SPLITS, num_inputs // _LEAST_INPUTS))
    per_split = cdiv(num_inputs, splits * _DEPTH) * _DEPTH
    splits = cdiv(num_inputs, per_split)
    parts = torch.empty(splits, num_tokens, num_logits, dtype=torch.float32, device=device)
    _route[(cdiv(num_logits, _OUTPUTS), splits, cdiv(num_tokens, _ROWS))](
        x_TE,
        weight_LE,
        logit_bias_L,
        bias_X,
        factors_X,
        parts,
        counters,
        chosen_TC,
        weights_TC,
        *tiles,
        num_tokens,
        len(tiles.expert_B),
        rule.weight_scale,
        TINY,
        E=num_inputs,
        PER_SPLIT=per_split,
        SPLITS=splits,
        M=rows,
        IS_EXACT=is_exact,
        ROWS=_ROWS,
        MOST=MOST_TOKENS,
        BLOCK_L=_OUTPUTS,
        BLOCK_K=_DEPTH,
        BLOCK_S=_SORTED,
        BLOCK_J=power_of_2(cdiv(MOST_TOKENS, rows)),
        **constants(rule, num_logits),
        num_warps=8,
        num_stages=3 if x_TE.element_size() == 2 else 2,
    )
    return RoutedTokens(chosen_TC, weights_TC, tiles)


@partial(jit, do_not_specialize=["num_tokens", "num_tiles"])
def _route(
    x: tl.tensor,
    weight: tl.tensor,
    logit_bias: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    weight_scale: tl.tensor,
    tiny: tl.tensor,
    E: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    IS_EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    WEIGHS_SHARED: tl.constexpr,
) -> None:
    """One program: BLOCK_L logits of ROWS tokens over its share of inputs; the last programs also choose and sort.

    X, C: number of experts per group and of chosen experts, as in `choose`.
    """
    L: tl.constexpr = G * X + WEIGHS_SHARED
    tile = tl.program_id(2)
    t = tile * ROWS + tl.arange(0, ROWS)
    is_t = t < num_tokens
    _add_up(
        x, weight, parts + (tl.program_id(1) * num_tokens + t)[:, None] * L, t, is_t, L, E, PER_SPLIT, BLOCK_L, BLOCK_K
    )
    tl.debug_barrier()
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") < tl.num_programs(0) * SPLITS - 1:
        return
    tl.store(counters + tile, 0)

    place, is_place = experts_of_places(G, X, BLOCK_G, BLOCK_X)
    logits = tl.zeros([ROWS, BLOCK_G * BLOCK_X], tl.float32)
    of_shared = tl.zeros([ROWS], tl.float32)
    for split in range(SPLITS):
        row = parts + (split * num_tokens + t) * L
        mask = is_t[:, None] & is_place[None, :]
        logits += tl.load(row[:, None] + place[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        if WEIGHS_SHARED:
            of_shared += tl.load(row + G * X, mask=is_t, other=0.0, cache_modifier=".cg")
    if logit_bias is not None:
        logits += tl.load(logit_bias + place, mask=is_place, other=0.0).to(tl.float32)[None, :]
        if WEIGHS_SHARED:
            of_shared += tl.load(logit_bias + G * X).to(tl.float32)
    if not IS_EXACT:
        logits = logits.to(x.dtype.element_ty).to(tl.float32)
        of_shared = of_shared.to(x.dtype.element_ty).to(tl.float32)
    found, found_weights = choose(
        logits, of_shared, bias, factors, weight_scale, tiny,
        C, SHARED, G, X, CHOSEN_GROUPS, BLOCK_C, BLOCK_G, BLOCK_X, IS_SIGMOID, NORMALIZES, WEIGHS_SHARED,
    )  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    mask = is_t[:, None] & (c < C + SHARED)[None, :]
    tl.store(chosen + t[:, None] * (C + SHARED) + c[None, :], found.to(tl.int64), mask=mask)
    tl.store(weights + t[:, None] * (C + SHARED) + c[None, :], found_weights, mask=mask)
    tl.debug_barrier()
    if tl.atomic_add(counters + MOST // ROWS, 1, sem="acq_rel") < tl.num_programs(2) - 1:
        return
    tl.store(counters + MOST // ROWS, 0)
    _sort(chosen, choices, experts, num_tokens, num_tiles, G * X + SHARED, C + SHARED, M, MOST, BLOCK_S, BLOCK_J)


@jit
def _add_up(
    x: tl.tensor,
    weight: tl.tensor,
    part: tl.tensor,
    t: tl.tensor,
    is_t: tl.tensor,
    L: tl.constexpr,
    E: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Accumulate and store this program's partial sums."""
    o, k = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K)
    dtype = weight.dtype.element_ty
    sums = tl.zeros([t.shape[0], BLOCK_L], tl.float32)
    for start in range(tl.program_id(1) * PER_SPLIT, tl.minimum((tl.program_id(1) + 1) * PER_SPLIT, E), BLOCK_K):
        is_k = start + k < E
        row = tl.load(x + t[:, None] * E + (start + k)[None, :], mask=is_t[:, None] & is_k[None, :], other=0.0)
        column = tl.load(
            weight + o[None, :] * E + (start + k)[:, None], mask=(o < L)[None, :] & is_k[:, None], other=0.0
        )
        sums = tl.dot(row.to(dtype), column, sums, input_precision="ieee")
    tl.store(part + o[None, :], sums, mask=is_t[:, None] & (o < L)[None, :])


@jit
def _sort(
    chosen: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    X: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """Sort as expert_tiles.py does, BLOCK_S experts at a time.

    A token has an expert at most once, so a choice's rank within its expert is the number of earlier tokens with it.
    X, C: number of all experts, and of a token's experts, shared ones included.
    """
    t, s, m, j = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_S), tl.arange(0, M), tl.arange(0, BLOCK_J)
    begin = 0
    for first in range(0, X, BLOCK_S):
        expert = first + s
        choice = tl.full([BLOCK_T, BLOCK_S], -1, tl.int32)
        for c in tl.static_range(C):
            of_token = tl.load(chosen + t * C + c, mask=t < num_tokens, other=-1, cache_modifier=".cg").to(tl.int32)
            choice = tl.where(of_token[:, None] == expert[None, :], (t * C + c)[:, None], choice)
        is_there = (choice >= 0).to(tl.int32)
        counts = tl.sum(is_there, axis=0)
        tiles = (counts + M - 1) // M
        begins = begin + tl.cumsum(tiles, axis=0) - tiles
        rank = tl.cumsum(is_there, axis=0) - 1
        tl.store(choices + begins[None, :] * M + rank, choice, mask=choice >= 0)
        empty = (begins * M + counts)[:, None] + m[None, :]
        padding = tl.zeros([BLOCK_S, M], tl.int32) + num_tokens * C
        tl.store(choices + empty, padding, mask=empty < ((begins + tiles) * M)[:, None])
        whose = tl.zeros([BLOCK_S, BLOCK_J], tl.int32) + expert[:, None]
        tl.store(experts + begins[:, None] + j[None, :], whose, mask=j[None, :] < tiles[:, None])
        begin += tl.sum(tiles, axis=0)
    for first in range(begin, num_tiles, BLOCK_S):
        tl.store(experts + first + s, tl.zeros([BLOCK_S], tl.int32) + X, mask=first + s < num_tiles)
