"""Even split of a step's keys among programs, for rows of any lengths.

The rows' keys are laid out row after row in blocks of KEYS. Every program takes the same number of blocks, regardless
of row boundaries:

    rows      |------ 0 ------|- 1 -|------------- 2 -------------|
    programs  |--- 0 ---|--- 1 ---|--- 2 ---|--- 3 ---|--- 4 ---|-|

A part is the result of one program for one row. Each next part belongs to either the next program or the next row, so
program w's part of row r is part w + r, and W + R parts suffice. All shapes depend only on the number of rows and on
`longest`, so the split can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, tl

# R rows, W programs (of one kv head)

# Keys per block.
KEYS = 64
# Minimum blocks per program; with fewer, combining the parts costs more than the split saves.
_MIN_BLOCKS = 4
# Rows and programs processed together.
_ROWS, _PROGRAMS = 128, 16


@dataclass(frozen=True)
class Splits:
    """Split of one step's keys, shared by all layers with the same window or chunk."""

    # int32 (R + 2): each row's first block; then the total number of blocks, and the blocks per program.
    starts_R: Tensor
    # int32: row of each program's first block.
    rows_W: Tensor

    @classmethod
    def of(
        cls,
        contexts_R: Tensor,
        *,
        window: int | None = None,
        chunk: int | None = None,
        most: int = 1,
        num_heads: int,
        longest: int,
        resident: int,
    ) -> Splits:
        """Split the keys of R rows.

        contexts: (R,) int32 keys of each row, at most `longest`. most: queries of a row; see QueryGroups. num_heads:
        number of programs per part, one for each head or group of heads. resident: programs that a multiprocessor runs
        at once.
        """
        processors = torch.cuda.get_device_properties(contexts_R.device).multi_processor_count
        target = processors * resident // num_heads
        possible = len(contexts_R) * cdiv(cdiv(longest, KEYS), _MIN_BLOCKS)
        return share_out(contexts_R, window=window, chunk=chunk, most=most, num_programs=max(1, min(target, possible)))


def share_out(
    contexts_R: Tensor, *, window: int | None = None, chunk: int | None = None, most: int = 1, num_programs: int
) -> Splits:
    starts_R = torch.empty(len(contexts_R) + 2, dtype=torch.int32, device=contexts_R.device)
    rows_W = torch.empty(num_programs, dtype=torch.int32, device=contexts_R.device)
    _share_out[(1,)](
        contexts_R,
        starts_R,
        rows_W,
        len(contexts_R),
        num_programs,
        Q=most,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        BLOCK_N=KEYS,
        MIN_BLOCKS=_MIN_BLOCKS,
        BLOCK_R=_ROWS,
        BLOCK_W=_PROGRAMS,
    )
    return Splits(starts_R, rows_W)


@jit
def blocks_of(
    context: tl.tensor, Q: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first block of a row that any of its last Q queries sees, and the number of blocks that they see."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - (WINDOW + Q - 1), 0) // BLOCK_N
    elif CHUNK > 0:
        first = tl.maximum(context - Q, 0) // CHUNK * CHUNK // BLOCK_N
    return first, (context + BLOCK_N - 1) // BLOCK_N - first


@partial(jit, do_not_specialize=["num_rows", "num_programs"])
def _share_out(
    contexts: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    num_programs: tl.tensor,
    Q: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Single program for all rows; a decode step has a few hundred."""
    i = tl.arange(0, BLOCK_R)
    total = 0
    for start in range(0, num_rows, BLOCK_R):
        r = start + i
        _, count = blocks_of(tl.load(contexts + r, mask=r < num_rows, other=0), Q, WINDOW, CHUNK, BLOCK_N)
        tl.store(starts + r, total + tl.cumsum(count, axis=0) - count, mask=r < num_rows)
        total += tl.sum(count, axis=0)
    share = tl.maximum((total + num_programs - 1) // num_programs, MIN_BLOCKS)
    tl.store(starts + num_rows, total)
    tl.store(starts + num_rows + 1, share)
    for start in range(0, num_programs, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        # Counts the rows that end at or before the program's first block.
        row = tl.zeros([BLOCK_W], tl.int32)
        end = 0
        for first in range(0, num_rows, BLOCK_R):
            r = first + i
            _, count = blocks_of(tl.load(contexts + r, mask=r < num_rows, other=0), Q, WINDOW, CHUNK, BLOCK_N)
            ends = end + tl.cumsum(count, axis=0)
            is_before = (ends[None, :] <= (w * share)[:, None]) & (r < num_rows)[None, :]
            row += tl.sum(is_before.to(tl.int32), axis=1)
            end += tl.sum(count, axis=0)
        tl.store(rows + w, row, mask=w < num_programs)
