"""Sorting of choices by expert, each expert's run padded to whole tiles of M rows; see fused_experts.py.

The number of tiles depends on the choices, which only the device has. Launches therefore cover the maximum,
ceil(N / M) + min(X, N) - 1, since each expert wastes less than one tile.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl

# T tokens, C choices per token, N = T * C choices, X experts, M rows per tile, B tiles, P = B * M places

# Choices that a program reads at a time, in decode steps and in prompts.
_AT_ONCE = 512, 4096
# Minimum rows per tile: the height of a matrix operand.
_MIN_ROWS = 16


class Tiles(NamedTuple):
    # int32: choice at each place, N for padding.
    choice_P: Tensor
    # int32: expert of each tile, X for an empty one, whose places are undefined.
    expert_B: Tensor

    @property
    def rows(self) -> int:
        return len(self.choice_P) // len(self.expert_B)


def rows_of_tiles(num_choices: int, num_experts: int, *, most: int) -> int:
    """Return the M that wastes few products if choices are spread evenly over experts."""
    return min(most, max(_MIN_ROWS, power_of_2(cdiv(num_choices, num_experts))))


def launch_sort_into_tiles(chosen_TC: Tensor, *, num_experts: int, rows: int) -> Tiles:
    """Sort choices without waiting for the device. chosen: int64, contiguous, each below num_experts."""
    assert chosen_TC.is_contiguous()
    num_choices, device = chosen_TC.numel(), chosen_TC.device
    tiles = new_tiles(num_choices, num_experts, rows, device)
    at_once = _AT_ONCE[num_choices > _AT_ONCE[0]]
    _sort_into_tiles[(num_experts,)](
        chosen_TC,
        *tiles,
        num_choices,
        len(tiles.expert_B),
        X=num_experts,
        M=rows,
        BLOCK_X=power_of_2(num_experts + 1),
        BLOCK_N=at_once,
        num_warps=max(4, at_once // 512),
    )
    return tiles


def new_tiles(num_choices: int, num_experts: int, rows: int, device: torch.device) -> Tiles:
    """Allocate tiles for a kernel to fill."""
    num_tiles = most_tiles(num_choices, num_experts, rows)
    places = torch.empty(num_tiles * (rows + 1), dtype=torch.int32, device=device)
    return Tiles(places[: num_tiles * rows], places[num_tiles * rows :])


def most_tiles(num_choices: int, num_experts: int, rows: int) -> int:
    return cdiv(num_choices, rows) + min(num_experts, num_choices) - 1


@partial(jit, do_not_specialize=["num_choices", "num_tiles"])
def _sort_into_tiles(
    chosen: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_choices: tl.tensor,
    num_tiles: tl.tensor,
    X: tl.constexpr,
    M: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: one expert's tiles and a share of the empty ones.

    Every program counts all choices itself, so that none waits for another.
    """
    expert = tl.program_id(0)
    x, n, m = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_N), tl.arange(0, M)
    counts = tl.zeros([BLOCK_X], tl.int32)
    for start in range(0, num_choices, BLOCK_N):
        of = tl.load(chosen + start + n, mask=start + n < num_choices, other=X).to(tl.int32)
        counts += tl.histogram(of, BLOCK_X)
    tiles = tl.where(x < X, (counts + M - 1) // M, 0)
    first_tile = tl.sum(tl.where(x < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(x == expert, tiles, 0), axis=0)

    place = first_tile * M
    if own_tiles > 0:
        for start in range(0, num_choices, BLOCK_N):
            of = tl.load(chosen + start + n, mask=start + n < num_choices, other=X).to(tl.int32)
            is_own = (of == expert).to(tl.int32)
            tl.store(choices + place + tl.cumsum(is_own, axis=0) - 1, start + n, mask=is_own == 1)
            place += tl.sum(is_own, axis=0)
        end = (first_tile + own_tiles) * M
        tl.store(choices + place + m, tl.zeros([M], tl.int32) + num_choices, mask=place + m < end)
    for start in range(0, own_tiles, BLOCK_N):
        tile = first_tile + start + n
        tl.store(experts + tile, tl.zeros([BLOCK_N], tl.int32) + expert, mask=start + n < own_tiles)
    for start in range(tl.sum(tiles, axis=0) + expert * BLOCK_N, num_tiles, X * BLOCK_N):
        tl.store(experts + start + n, tl.zeros([BLOCK_N], tl.int32) + X, mask=start + n < num_tiles)
