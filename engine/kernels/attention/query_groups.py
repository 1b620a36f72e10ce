"""Queries of rows that decode, cut into strips: up to so many of one row, one behind the other, for which the row's
keys are read once.

A row that decodes has one query, and of a draft one more for each of its tokens. A matrix unit multiplies 16 rows at a
time: where few query heads share a kv head, the heads of several queries have room in what one query would fill with
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_Ints = NDArray[np.int64]

# R rows, U strips, N queries of all strips, B blocks

TILE_ROWS = 16  # of a matrix unit's operand


@dataclass(frozen=True)
class QueryGroups:
    """All numbers are int32, on the device."""

    firsts_U: Tensor  # the token in the step of a strip's first query
    counts_U: Tensor  # of its queries, 1 to `most`
    tables_UB: Tensor
    contexts_U: Tensor  # keys that its last query sees, itself included; 0: a strip that is not there
    tokens_N: Tensor  # of each query, in the step
    seats_N: Tensor  # its strip times `most`, and which query of it this is; of a strip that is not there it gets zeros
    most: int
    longest: int  # no context is longer

    @classmethod
    def of(cls, numbers: Sequence[Tensor], *, most: int, longest: int) -> QueryGroups:
        """numbers: as above, in their order."""
        firsts_U, counts_U, tables_UB, contexts_U, tokens_N, seats_N = numbers
        return cls(firsts_U, counts_U, tables_UB, contexts_U, tokens_N, seats_N, most, longest)


def most_queries(num_heads: int, num_kv_heads: int) -> int:
    """Of a strip, so that none costs more than one query does."""
    return max(1, TILE_ROWS // (num_heads // num_kv_heads))


class QueryGroupSizes(NamedTuple):
    """On the host."""

    rows_U: _Ints
    firsts_U: _Ints  # counted within the row
    counts_U: _Ints
    contexts_U: _Ints

    @property
    def places_N(self) -> _Ints:
        """Of their queries, one strip behind the other: how many come before it in its strip."""
        before_U = np.cumsum(self.counts_U) - self.counts_U
        return np.arange(int(self.counts_U.sum())) - np.repeat(before_U, self.counts_U)

    def seats_N(self, most: int) -> _Ints:
        """See QueryStrips."""
        return np.repeat(np.arange(len(self.counts_U)) * most, self.counts_U) + self.places_N


def cut_query_groups(lengths_R: _Ints, contexts_R: _Ints, *, most: int) -> QueryGroupSizes:
    """lengths: queries of each row, the last ones of its context."""
    num_R = -(-lengths_R // most)
    rows_U = np.repeat(np.arange(len(num_R)), num_R)
    firsts_U = (np.arange(len(rows_U)) - np.repeat(np.cumsum(num_R) - num_R, num_R)) * most
    counts_U = np.minimum(lengths_R[rows_U] - firsts_U, most)
    contexts_U = (contexts_R - lengths_R)[rows_U] + firsts_U + counts_U
    return QueryGroupSizes(rows_U, firsts_U, counts_U, contexts_U)
