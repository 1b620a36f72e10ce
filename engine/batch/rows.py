"""The rows of a step, and how they are told by what is different from the step before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# T tokens of this step, R rows, N those of them that are new, B blocks that tables get in this step, S rows that are
# scored


class Row(NamedTuple):
    """One sequence's share of a step: compute positions [start, end), which attend to everything before them."""

    token_ids: Seq[int]  # of positions [start, end)
    start: int
    blocks: Seq[int]  # the sequence's block table
    num_logits: int  # of so many last positions; 0 inside a prompt that is computed in chunks
    adapter: int = 0  # which of the model's adapters it goes through; 0: none

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class RowChanges:
    """The rows of a step. One that goes on where a row of the step before ended is told by that one's place: it has
    that one's adapter and blocks, and those that its end takes beyond them. Of a new row everything is told.

    All arrays are int64.
    """

    number: int  # of the step, among those that have rows
    kept: Ints  # (R,) the place, in the step before, of the row that it goes on from; -1: a new row
    query_lens: Ints  # (R,) tokens of each; they sum to T
    num_logits: Ints  # (R,) of so many last positions
    starts: Ints  # (N,)
    adapters: Ints  # (N,)
    token_ids: Ints  # (T,)
    blocks: Ints  # (B,) row by row
    # (S, 2) rows of whose first so many positions the logits are wanted, too: see engine.scheduler.prompt_scoring.
    # Mostly none.
    scored: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> RowChanges:
        """All of them new."""
        numbers = [(len(row.token_ids), row.start, row.num_logits, row.adapter) for row in rows]
        query_lens, starts, num_logits, adapters = np.array(numbers, dtype=np.int64).T.copy()
        return cls(
            number=0,
            kept=np.full(len(rows), -1),
            query_lens=query_lens,
            num_logits=num_logits,
            starts=starts,
            adapters=adapters,
            token_ids=np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, int(query_lens.sum())),
            blocks=np.concatenate([np.array(row.blocks[: -(-row.end // block_size)], dtype=np.int64) for row in rows]),
        )

    @property
    def is_whole(self) -> bool:
        """Whether it can be understood without the step before."""
        return bool((self.kept < 0).all())

    def encode(self) -> Ints:
        """All of it as one int64 array for the ranks that follow: the number, R, N, T, B, 2 S, then the arrays."""
        sizes = (len(self.kept), len(self.starts), len(self.token_ids), len(self.blocks), self.scored.size)
        rows, new = (self.kept, self.query_lens, self.num_logits), (self.starts, self.adapters)
        return np.concatenate(
            [(self.number, *sizes), *rows, *new, self.token_ids, self.blocks, self.scored.reshape(-1)]
        )

    @classmethod
    def decode(cls, data: Ints) -> RowChanges:
        """The inverse of `encode`. Raises ValueError for what no rows make; its numbers may still be any."""
        number, rows, new, tokens, blocks, scored = (int(n) for n in data[:6])
        sizes = (rows, rows, rows, new, new, tokens, blocks, scored)
        if min(sizes) < 0 or sum(sizes) != len(data) - 6 or scored % 2:
            raise ValueError(f"{len(data)} numbers are not {rows} rows of {tokens} tokens and {blocks} blocks")
        parts = np.split(data[6:], np.cumsum(sizes)[:-1])
        kept, query_lens, num_logits, starts, adapters, token_ids, added, spans = parts
        return cls(
            number=number,
            kept=kept,
            query_lens=query_lens,
            num_logits=num_logits,
            starts=starts,
            adapters=adapters,
            token_ids=token_ids,
            blocks=added,
            scored=spans.reshape(-1, 2),
        )


def num_blocks(ends: Ints, block_size: int) -> Ints:
    """That so many positions take."""
    return -(-ends // block_size)
