"""Rows of a step, encoded as differences from the previous step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# T tokens of this step, R rows, N new rows, B blocks added to tables in this step, S scored rows


class Row(NamedTuple):
    """Share of one sequence in a step: positions [start, end), which attend to everything before them."""

    # Tokens of positions [start, end).
    token_ids: Seq[int]
    start: int
    # The sequence's block table.
    blocks: Seq[int]
    # Number of last positions with logits; 0 for a prefill chunk that is not the last.
    num_logits: int
    # Adapter id; 0: none.
    adapter: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class RowChanges:
    """Rows of a step as differences from the previous step. All arrays are int64.

    A row that continues one of the previous step refers to it by place and inherits its adapter and blocks; only the
    blocks added in this step are listed. New rows are described in full.
    """

    # Number of the step, counting steps with rows.
    number: int
    # (R,) place of the continued row in the previous step; -1: a new row.
    kept: Ints
    # (R,) tokens of each row; they sum to T.
    query_lens: Ints
    # (R,) number of last positions with logits.
    num_logits: Ints
    starts: Ints  # (N,)
    adapters: Ints  # (N,)
    token_ids: Ints  # (T,)
    # (B,) row by row.
    blocks: Ints
    # (S, 2) pairs (row, count): the row's first `count` positions need logits too. Mostly empty; see
    # engine.scheduler.prompt_scoring.
    scored: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> RowChanges:
        """Describe `rows` in full, all as new rows."""
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
        """True if it does not depend on the previous step."""
        return bool((self.kept < 0).all())

    def encode(self) -> Ints:
        """Encode as one int64 array for the other ranks: the number, R, N, T, B, 2 S, then the arrays."""
        sizes = (len(self.kept), len(self.starts), len(self.token_ids), len(self.blocks), self.scored.size)
        rows, new = (self.kept, self.query_lens, self.num_logits), (self.starts, self.adapters)
        return np.concatenate(
            [(self.number, *sizes), *rows, *new, self.token_ids, self.blocks, self.scored.reshape(-1)]
        )

    @classmethod
    def decode(cls, data: Ints) -> RowChanges:
        """Decode the output of `encode`. Raises ValueError if the sizes do not match; values are not checked."""
        number, rows, new, tokens, blocks, scored = (int(n) for n in data[:6])
        sizes = (rows, rows, rows, new, new, tokens, blocks, scored)
        if min(sizes) < 0 or sum(sizes) != len(data) - 6 or scored % 2:
            raise ValueError(
                f"malformed row changes: {len(data)} numbers for {rows} rows, {tokens} tokens and {blocks} blocks"
            )
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
    """Return the number of blocks that positions [0, end) occupy, for each of `ends`."""
    return -(-ends // block_size)
