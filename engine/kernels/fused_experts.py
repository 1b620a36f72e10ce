"""The gated MLPs of a mixture of experts, all at once: for each token and each of its experts, the expert's output.

    out[t, c] = down_x (silu(gate_x x_t) * (up_x x_t))        x = chosen[t, c]

Choices are sorted by expert and each expert's run is filled up to whole tiles of M rows, so that a program multiplies
rows of one expert with a part of its weights (a grouped product). Two kernels: gate, up and what is between them; then
down. How many tiles there are follows from the choices, which only the device knows: so programs are launched for the
most that there can be, and those past the end do nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.silu_mul import silu_mul

# T tokens, C choices of each, N = T * C choices, E hidden_size, X experts, I features of one, M rows of a tile,
# P places: N and what fills up the tiles

_MIN_ROWS, _MAX_ROWS = 16, 128
_OUTPUTS = 64  # of one program, of gate and of up each; twice as many of down where there are many rows
_DEPTH = 64  # inputs multiplied at a time


def fused_experts(x_TE: Tensor, gate_up_X2IE: Tensor, down_XEI: Tensor, chosen_TC: Tensor) -> Tensor:
    """The output of every chosen expert, not yet weighed: (T, C, E) of x's dtype, products accumulated in fp32.

    x: (T, E) bf16, fp16 or fp32. gate_up: (X, 2 I, E), gate rows first. down: (X, E, I). chosen: (T, C) int64, each
    below X.
    """
    compute = launch_fused_experts if x_TE.is_cuda else reference_fused_experts
    return compute(x_TE, gate_up_X2IE, down_XEI, chosen_TC)


def reference_fused_experts(x_TE: Tensor, gate_up_X2IE: Tensor, down_XEI: Tensor, chosen_TC: Tensor) -> Tensor:
    out_TCE = x_TE.new_empty(*chosen_TC.shape, x_TE.shape[1])
    for expert in sorted(set(chosen_TC.flatten().tolist())):
        token, choice = (chosen_TC == expert).nonzero(as_tuple=True)
        out_TCE[token, choice] = silu_mul(x_TE[token] @ gate_up_X2IE[expert].T) @ down_XEI[expert].T
    return out_TCE


def launch_fused_experts(x_TE: Tensor, gate_up_X2IE: Tensor, down_XEI: Tensor, chosen_TC: Tensor) -> Tensor:
    (num_tokens, hidden), num_choices = x_TE.shape, chosen_TC.numel()
    num_experts, features = down_XEI.shape[0], down_XEI.shape[2]
    x_TE = x_TE.contiguous()
    assert gate_up_X2IE.is_contiguous() and down_XEI.is_contiguous()
    out_TCE = x_TE.new_empty(num_tokens, chosen_TC.shape[1], hidden)
    if not num_choices:
        return out_TCE
    per_expert = cdiv(num_choices, num_experts)
    rows = min(_MAX_ROWS, max(_MIN_ROWS, power_of_2(per_expert)))
    choice_P, expert_B = sort_into_tiles(chosen_TC, num_experts=num_experts, rows=rows)
    features_NI = x_TE.new_empty(num_choices, features)
    outputs = _OUTPUTS if rows < _MAX_ROWS else 2 * _OUTPUTS
    sizes = {"M": rows, "BLOCK_K": _DEPTH, "num_warps": 4 if rows < _MAX_ROWS else 8, "num_stages": 3}
    # Programs that run at a time are those of few tiles: their rows and their experts' weights are in the cache.
    _gate_up[(cdiv(features, _OUTPUTS), len(expert_B))](
        x_TE,
        gate_up_X2IE,
        features_NI,
        choice_P,
        expert_B,
        num_choices,
        num_experts,
        C=chosen_TC.shape[1],
        K=hidden,
        F=features,
        BLOCK_O=_OUTPUTS,
        **sizes,
    )
    _down[(cdiv(hidden, outputs), len(expert_B))](
        features_NI,
        down_XEI,
        out_TCE,
        choice_P,
        expert_B,
        num_choices,
        num_experts,
        K=features,
        F=hidden,
        BLOCK_O=outputs,
        **sizes,
    )
    return out_TCE


def sort_into_tiles(chosen_TC: Tensor, *, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Choices in the order of their experts, each expert's filled up to whole tiles of `rows`.

    Returns the choice at each place (P,) int32, N or more where there is none, and the expert of each tile (P / rows,)
    int32, num_experts where the tile is empty. P depends on shapes only, so that nothing waits for the device.
    """
    flat_N = chosen_TC.flatten()
    num_choices, device = len(flat_N), chosen_TC.device
    order_N = flat_N.argsort(stable=True)
    counts_X = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts_X.scatter_add_(0, flat_N, torch.ones_like(flat_N))
    tiles_X = (counts_X + rows - 1) // rows
    num_tiles = cdiv(num_choices, rows) + min(num_experts, num_choices) - 1  # at most: each expert wastes less than one
    first_place_X = (tiles_X.cumsum(0) - tiles_X) * rows
    shift_X = first_place_X - (counts_X.cumsum(0) - counts_X)
    place_N = torch.arange(num_choices, device=device) + shift_X[flat_N[order_N]]
    choice_P = torch.full((num_tiles * rows,), num_choices, dtype=torch.int32, device=device)
    choice_P[place_N] = order_N.to(torch.int32)
    tile_B = torch.arange(num_tiles, device=device)
    expert_B = torch.searchsorted(tiles_X.cumsum(0), tile_B, right=True).to(torch.int32)
    return choice_P, expert_B


@partial(jit, do_not_specialize=["num_choices"])
def _gate_up(
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_choices: tl.tensor,
    num_experts: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_O features of the choices of one tile."""
    expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
    if expert >= num_experts:
        return
    choice = tl.load(choices + tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    is_row = choice < num_choices
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    row = x + (choice // C)[:, None] * K + k[None, :]
    gate_row = weights + (expert * 2 * F + o)[None, :] * K + k[:, None]
    gate = tl.zeros([M, BLOCK_O], tl.float32)
    up = tl.zeros([M, BLOCK_O], tl.float32)
    for start in range(0, K, BLOCK_K):
        is_k = start + k < K
        a = tl.load(row + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
        mask = is_k[:, None] & (o < F)[None, :]
        gate = tl.dot(a, tl.load(gate_row + start, mask=mask, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(gate_row + F * K + start, mask=mask, other=0.0), up, input_precision="ieee")
    # As silu_mul does it: of products rounded to the model's dtype.
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + choice[:, None] * F + o[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None] & (o < F))


@partial(jit, do_not_specialize=["num_choices"])
def _down(
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_choices: tl.tensor,
    num_experts: tl.tensor,
    K: tl.constexpr,
    F: tl.constexpr,
    M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_O outputs of the choices of one tile."""
    expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
    if expert >= num_experts:
        return
    choice = tl.load(choices + tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    is_row = choice < num_choices
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    row = x + choice[:, None] * K + k[None, :]
    weight_row = weights + (expert * F + o)[None, :] * K + k[:, None]
    result = tl.zeros([M, BLOCK_O], tl.float32)
    for start in range(0, K, BLOCK_K):
        is_k = start + k < K
        a = tl.load(row + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
        b = tl.load(weight_row + start, mask=is_k[:, None] & (o < F)[None, :], other=0.0)
        result = tl.dot(a, b, result, input_precision="ieee")
    tl.store(out + choice[:, None] * F + o[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None] & (o < F))
