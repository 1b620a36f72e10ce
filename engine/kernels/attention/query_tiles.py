"""Tiles of prompt queries that never cross rows: one program computes one tile of one head.

Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ints = NDArray[np.int64]

# R rows, N tiles

# Queries that four warps multiply at once.
TILE_QUERIES = 64


@dataclass(frozen=True)
class QueryTiles:
    """Rows of a prefill launch, and their queries' tiles."""

    # int32, row of tables and contexts.
    rows_N: Tensor
    # int32, the tile's first query, relative to its row.
    firsts_N: Tensor
    # int32, each row's first token in the step.
    begins_R: Tensor
    # int32, number of each row's queries.
    lengths_R: Tensor

    @classmethod
    def of(
        cls,
        begins_R: _Ints,
        lengths_R: _Ints,
        contexts_R: _Ints,
        device: torch.device,
    ) -> QueryTiles:
        """Cut the rows and upload the tiles; see cut_tiles."""
        arrays = (*cut_tiles(lengths_R, contexts_R), begins_R, lengths_R)
        return cls(*(torch.from_numpy(numbers.astype(np.int32)).to(device) for numbers in arrays))


def cut_tiles(lengths_R: _Ints, contexts_R: _Ints) -> tuple[_Ints, _Ints]:
    """Return the row and the first query of each tile (N,).

    Tiles that see the most keys come first, so that none of them starts when the others are done.
    """
    counts = -(-lengths_R // TILE_QUERIES)
    rows = np.repeat(np.arange(len(counts)), counts)
    firsts = np.concatenate([np.arange(count) * TILE_QUERIES for count in counts] or [np.zeros(0, np.int64)])
    order = np.argsort(-((contexts_R - lengths_R)[rows] + firsts), kind="stable")
    return rows[order], firsts[order]
