"""Queries that one program computes together: groups of a decoding row, and tiles of a prompt.

A group's consecutive queries share one read of the row's keys. A decoding row has one query, plus one per draft token.
A matrix unit multiplies 16 rows at a time: if few query heads share a KV head, the heads of several queries fit into
one padded operand.

A tile never crosses rows: one program computes one tile of one head; Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Ints = NDArray[np.int64]

# R rows, U groups, N queries of all groups, or tiles, B blocks

# Rows of a matrix operand.
TILE_ROWS = 16
# Queries of a tile: as many as four warps multiply at once.
TILE_QUERIES = 64


@dataclass(frozen=True)
class QueryGroups:
    """Query groups of one step. All tensors are int32 on the device."""

    # Token in the step of a group's first query.
    firsts_U: Tensor
    # Number of its queries, 1 to `most`.
    counts_U: Tensor
    tables_UB: Tensor
    # Keys that a group's last query sees, including its own; 0: padding.
    contexts_U: Tensor
    # Token in the step of each query.
    tokens_N: Tensor
    # Group index times `most`, plus the query's index in the group. Queries of padding groups get zeros.
    seats_N: Tensor
    most: int
    # Upper bound of the contexts.
    longest: int

    @classmethod
    def of(cls, numbers: Sequence[Tensor], *, most: int, longest: int) -> QueryGroups:
        """Build from the tensors above, in order."""
        firsts_U, counts_U, tables_UB, contexts_U, tokens_N, seats_N = numbers
        return cls(firsts_U, counts_U, tables_UB, contexts_U, tokens_N, seats_N, most, longest)


def most_queries(num_heads: int, num_kv_heads: int) -> int:
    """Return the largest group size at which a group costs no more than one query."""
    return max(1, TILE_ROWS // (num_heads // num_kv_heads))


class QueryGroupSizes(NamedTuple):
    """Groups on the host."""

    rows_U: _Ints
    # Relative to the row.
    firsts_U: _Ints
    counts_U: _Ints
    contexts_U: _Ints

    @property
    def places_N(self) -> _Ints:
        """Return the index of each query in its group."""
        before_U = np.cumsum(self.counts_U) - self.counts_U
        return np.arange(int(self.counts_U.sum())) - np.repeat(before_U, self.counts_U)

    def seats_N(self, most: int) -> _Ints:
        """See QueryGroups."""
        return np.repeat(np.arange(len(self.counts_U)) * most, self.counts_U) + self.places_N


def cut_query_groups(lengths_R: _Ints, contexts_R: _Ints, *, most: int) -> QueryGroupSizes:
    """Cut rows into groups. lengths: queries of each row, the last ones of its context."""
    num_R = -(-lengths_R // most)
    rows_U = np.repeat(np.arange(len(num_R)), num_R)
    firsts_U = (np.arange(len(rows_U)) - np.repeat(np.cumsum(num_R) - num_R, num_R)) * most
    counts_U = np.minimum(lengths_R[rows_U] - firsts_U, most)
    contexts_U = (contexts_R - lengths_R)[rows_U] + firsts_U + counts_U
    return QueryGroupSizes(rows_U, firsts_U, counts_U, contexts_U)


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
    def of(cls, begins_R: _Ints, lengths_R: _Ints, contexts_R: _Ints, device: torch.device) -> QueryTiles:
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
