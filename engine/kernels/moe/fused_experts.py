"""Fused MoE: the MLPs of all experts at once. Computes each chosen expert's output for each token.

    out[t, c] = down_x activation(w gate_x x_t + b, w up_x x_t + b') + b"        x = chosen[t, c], w = weights[t, c]

The activation is one of gated_mul.py; relu2 has no gate. Biases b are gpt-oss's, input weights w Llama 4's.

Choices are sorted by expert and padded to tiles of M rows, so that a program multiplies rows of one expert with a part
of its weights (a grouped product). Two kernels: gate and up with the activation; then down. Programs are launched for
the maximum number of tiles (expert_tiles.py); those past the end return at once.

With low-bit weights, products are those of quantized_matmul.py: gate and up of all choices, gated_mul, down.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.gated_mul import SILU, GatedActivation, gated, launch_gated_mul
from engine.kernels.language import cdiv, jit, tl
from engine.kernels.moe.expert_tiles import Tiles, launch_sort_into_tiles, rows_of_tiles
from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.quantized_matmul import launch_expert_product, most_rows_of_experts

# T tokens, C choices per token, N = T * C choices, E hidden_size, X experts, I features of one expert

# Maximum rows per tile.
_MAX_ROWS = 128


class _Tile(NamedTuple):
    """Tile sizes of a program."""

    # Outputs of gate and of up each, or of down.
    outputs: int
    # Inputs per loop iteration.
    depth: int
    num_warps: int
    num_stages: int


# By the rows of a tile, as measured on an H100 in bf16; see docs/benchmarks/gpu.md.
_GATE_UP = {16: _Tile(64, 128, 4, 3), 32: _Tile(64, 128, 4, 3), 64: _Tile(128, 64, 8, 3), 128: _Tile(128, 64, 8, 4)}
_DOWN = {16: _Tile(128, 128, 8, 3), 32: _Tile(128, 128, 8, 3), 64: _Tile(256, 64, 8, 3), 128: _Tile(256, 64, 8, 4)}
# Products in fp32 do not use matrix units and are unrolled one by one.
_OF_FP32 = _Tile(64, 32, 4, 3)
_LEAST_DEPTH = 32
# Maximum accumulators per program if operands are in registers too.
_MOST_SUMS = 128 * 128
# Bytes of a multiprocessor's shared memory that are reserved per program.
_RESERVED = 1024


class ExpertBiases(NamedTuple):
    """Biases of all experts. With experts split over ranks, only rank 0 adds those of down."""

    gate_up_X2I: Tensor
    down_XE: Tensor | None


def launch_fused_experts(
    x_TE: Tensor,
    gate_up_X2IE: Tensor,
    down_XEI: Tensor,
    chosen_TC: Tensor,
    tiles: Tiles | None = None,
    *,
    activation: GatedActivation = SILU,
    biases: ExpertBiases | None = None,
    input_weights_TC: Tensor | None = None,
) -> Tensor:
    """Return the unweighted output of every chosen expert: (T, C, E) of x's dtype, accumulated in fp32.

    x: (T, E) bf16, fp16 or fp32. gate_up: (X, 2 I, E), gate rows first, or (X, I, E) without gates. down: (X, E, I).
    chosen: (T, C) int64, each below X. tiles: these choices sorted, if available. input_weights: fp32, contiguous; not
    with biases.
    """
    assert biases is None or input_weights_TC is None
    gate_up_X2I, down_XE = biases or (None, None)
    (num_tokens, hidden), num_choices = x_TE.shape, chosen_TC.numel()
    num_experts, features = down_XEI.shape[0], down_XEI.shape[2]
    x_TE = x_TE.contiguous()
    assert gate_up_X2IE.is_contiguous() and down_XEI.is_contiguous()
    out_TCE = x_TE.new_empty(num_tokens, chosen_TC.shape[1], hidden)
    if not num_choices:
        return out_TCE
    if tiles is None:
        rows = rows_of_tiles(num_choices, num_experts, most=_MAX_ROWS)
        tiles = launch_sort_into_tiles(chosen_TC, num_experts=num_experts, rows=rows)
    choice_P, expert_B = tiles
    rows = tiles.rows
    features_NI = x_TE.new_empty(num_choices, features)
    # Programs that run concurrently cover few tiles, so their rows and expert weights stay in the cache.
    tile = _fit(_GATE_UP[rows], rows, 2, x_TE)
    _gate_up[(cdiv(features, tile.outputs), len(expert_B))](
        x_TE,
        gate_up_X2IE,
        gate_up_X2I,
        input_weights_TC,
        features_NI,
        choice_P,
        expert_B,
        num_choices,
        num_experts,
        KIND=activation.kind,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        C=chosen_TC.shape[1],
        K=hidden,
        F=features,
        M=rows,
        BLOCK_O=tile.outputs,
        BLOCK_K=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = _fit(_DOWN[rows], rows, 1, x_TE)
    _down[(cdiv(hidden, tile.outputs), len(expert_B))](
        features_NI,
        down_XEI,
        down_XE,
        out_TCE,
        choice_P,
        expert_B,
        num_choices,
        num_experts,
        K=features,
        F=hidden,
        M=rows,
        BLOCK_O=tile.outputs,
        BLOCK_K=tile.depth,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TCE


# T tokens, C choices per token, E hidden_size, X experts, I features of one expert


def launch_coded_experts(
    x_TE: Tensor,
    gate_up: CodePanels,
    down: CodePanels,
    chosen_TC: Tensor,
    tiles: Tiles | None = None,
    *,
    activation: GatedActivation = SILU,
    biases: ExpertBiases | None = None,
    input_weights_TC: Tensor | None = None,
) -> Tensor:
    """Return the unweighted output of every chosen expert: (T, C, E) of x's dtype.

    gate_up: X experts, (2 I, E) each, gate rows first, or (I, E) without gates. down: (E, I) each. chosen: (T, C)
    int64, each below X. tiles: these choices sorted, if available. Others: see launch_fused_experts.
    """
    assert biases is None or input_weights_TC is None
    gate_up_X2I, down_XE = biases or (None, None)
    num_choices, num_experts = chosen_TC.numel(), len(down.words)
    if not num_choices:
        return x_TE.new_empty(*chosen_TC.shape, x_TE.shape[1])
    # Both products share the tiles.
    most = min(most_rows_of_experts(panels, x_TE.device) for panels in (gate_up, down))
    # The router's tiles may have more rows if tokens choose most of the experts.
    if tiles is None or tiles.rows > most:
        rows = rows_of_tiles(num_choices, num_experts, most=most)
        tiles = launch_sort_into_tiles(chosen_TC, num_experts=num_experts, rows=rows)
    choice_P, expert_B = tiles
    gate_up_N2I = launch_expert_product(
        x_TE.contiguous(),
        gate_up,
        choice_P,
        expert_B,
        num_choices,
        of_each=chosen_TC.shape[1],
        bias_XO=gate_up_X2I,
    )
    if input_weights_TC is not None:
        gate_up_N2I *= input_weights_TC.view(-1, 1)
    features_NI = launch_gated_mul(gate_up_N2I, activation)
    out_NE = launch_expert_product(features_NI, down, choice_P, expert_B, num_choices, of_each=1, bias_XO=down_XE)
    return out_NE.view(*chosen_TC.shape, x_TE.shape[1])


def _fit(tile: _Tile, rows: int, num_matrices: int, x: Tensor) -> _Tile:
    """Shrink the tile for devices with less shared memory than an H100, or with operands in registers."""
    if x.element_size() > 2:
        return _OF_FP32
    if not x.is_cuda:
        return tile
    if torch.cuda.get_device_capability(x.device) < (9, 0) and num_matrices * rows * tile.outputs > _MOST_SUMS:
        tile = tile._replace(outputs=tile.outputs // 2)
    room = torch.cuda.get_device_properties(x.device).shared_memory_per_multiprocessor - _RESERVED
    while tile.num_stages * tile.depth * (rows + num_matrices * tile.outputs) * x.element_size() > room:
        if tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.depth > _LEAST_DEPTH:
            tile = tile._replace(depth=tile.depth // 2)
        else:
            tile = tile._replace(outputs=tile.outputs // 2)
    return tile


@partial(jit, do_not_specialize=["num_choices"])
def _gate_up(
    x: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
    input_weights: tl.tensor,
    out: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_choices: tl.tensor,
    num_experts: tl.tensor,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    # Rows and outputs past the last duplicate the last one and are not stored, so that loads need no mask.
    row = x + (tl.minimum(choice, num_choices - 1) // C)[:, None] * K + k[None, :]
    N: tl.constexpr = 1 if KIND == "relu2" else 2
    up_row = weights + ((expert * N + N - 1) * F + tl.minimum(o, F - 1))[None, :] * K + k[:, None]
    gate = tl.zeros([M, BLOCK_O], tl.float32)
    up = tl.zeros([M, BLOCK_O], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = _part(row, start, k[None, :], K, BLOCK_K)
        if N == 2:
            gate = tl.dot(a, _part(up_row - F * K, start, k[:, None], K, BLOCK_K), gate, input_precision="ieee")
        up = tl.dot(a, _part(up_row, start, k[:, None], K, BLOCK_K), up, input_precision="ieee")
    # As gated_mul: applied to products rounded to the model's dtype.
    if input_weights is not None:
        weight = tl.load(input_weights + choice, mask=is_row, other=0.0)[:, None]
        gate, up = gate * weight, up * weight
    if biases is not None:
        bias = biases + (expert * N + N - 1) * F + tl.minimum(o, F - 1)
        if N == 2:
            gate += tl.load(bias - F).to(tl.float32)[None, :]
        up += tl.load(bias).to(tl.float32)[None, :]
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    result = gated(gate, up, ALPHA, LIMIT, KIND)
    tl.store(out + choice[:, None] * F + o[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None] & (o < F))


@partial(jit, do_not_specialize=["num_choices"])
def _down(
    x: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
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
    row = x + tl.minimum(choice, num_choices - 1)[:, None] * K + k[None, :]
    weight_row = weights + (expert * F + tl.minimum(o, F - 1))[None, :] * K + k[:, None]
    result = tl.zeros([M, BLOCK_O], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = _part(row, start, k[None, :], K, BLOCK_K)
        result = tl.dot(a, _part(weight_row, start, k[:, None], K, BLOCK_K), result, input_precision="ieee")
    if biases is not None:
        result += tl.load(biases + expert * F + tl.minimum(o, F - 1)).to(tl.float32)[None, :]
    tl.store(out + choice[:, None] * F + o[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None] & (o < F))


@jit
def _part(rows: tl.tensor, start: tl.tensor, k: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Load the inputs from `start` on. rows: pointers to input k of each row."""
    if K % BLOCK_K == 0:
        return tl.load(rows + start)
    return tl.load(rows + start, mask=start + k < K, other=0.0)
