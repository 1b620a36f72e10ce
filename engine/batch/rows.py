"""Rows of a step, encoded as differences from the previous step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# T tokens of this step, R rows, N new rows, B blocks added to tables in this step, S scored rows, W states written

_HEADER = 7  # numbers before the arrays of encoded changes


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
    # Index in the pool of its state slot, if the model has recurrent layers. The step continues from the state there,
    # unless the row starts at 0.
    state_index: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class RowChanges:
    """Rows of a step as differences from the previous step. All arrays are int64.

    A row that continues one of the previous step refers to it by place and inherits its adapter, state slot and blocks;
    only the blocks added in this step are listed. New rows are described in full.
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
    state_indices: Ints  # (N,)
    token_ids: Ints  # (T,)
    # (B,) row by row.
    blocks: Ints
    # (S, 2) pairs (row, count): the row's first `count` positions need logits too. Mostly empty; see
    # engine.scheduler.prompt_scoring.
    scored: Ints = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    # (W, 3) row, offset of a token in the row, and a slot, beside the row's own, that gets the state after this token.
    # Mostly empty.
    state_writes: Ints = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> RowChanges:
        """Describe `rows` in full, all as new rows."""
        numbers = [(len(row.token_ids), row.start, row.num_logits, row.adapter, row.state_index) for row in rows]
        query_lens, starts, num_logits, adapters, state_indices = np.array(numbers, dtype=np.int64).T.copy()
        return cls(
            number=0,
            kept=np.full(len(rows), -1),
            query_lens=query_lens,
            num_logits=num_logits,
            starts=starts,
            adapters=adapters,
            state_indices=state_indices,
            token_ids=np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, int(query_lens.sum())),
            blocks=np.concatenate([np.array(row.blocks[: -(-row.end // block_size)], dtype=np.int64) for row in rows]),
        )

    @property
    def is_whole(self) -> bool:
        """True if these rows do not depend on the previous step."""
        return bool((self.kept < 0).all())

    def encode(self) -> Ints:
        """Encode as one int64 array for the other ranks: the number, R, N, T, B, 2 S, 3 W, then the arrays."""
        rows, new = (self.kept, self.query_lens, self.num_logits), (self.starts, self.adapters, self.state_indices)
        others = self.token_ids, self.blocks, self.scored.reshape(-1), self.state_writes.reshape(-1)
        header = self.number, len(self.kept), len(self.starts), *map(len, others)
        return np.concatenate([header, *rows, *new, *others])

    @classmethod
    def decode(cls, data: Ints) -> RowChanges:
        """Decode the output of `encode`. Raises ValueError if the sizes do not match; values are not checked."""
        number, rows, new, tokens, blocks, scored, written = (int(n) for n in data[:_HEADER])
        sizes = (rows, rows, rows, new, new, new, tokens, blocks, scored, written)
        if min(sizes) < 0 or sum(sizes) != len(data) - _HEADER or scored % 2 or written % 3:
            raise ValueError(
                f"malformed row changes: {len(data)} numbers for {rows} rows, {tokens} tokens and {blocks} blocks"
            )
        parts = np.split(data[_HEADER:], np.cumsum(sizes)[:-1])
        kept, query_lens, num_logits, starts, adapters, state_indices, token_ids, added, spans, state_writes = parts
        return cls(
            number=number,
            kept=kept,
            query_lens=query_lens,
            num_logits=num_logits,
            starts=starts,
            adapters=adapters,
            state_indices=state_indices,
            token_ids=token_ids,
            blocks=added,
            scored=spans.reshape(-1, 2),
            state_writes=state_writes.reshape(-1, 3),
        )


def slots_in_windows(slots: Ints, window_of: Ints, block_size: int) -> Ints:
    """Map slots of positions to their slots in layers with a window. window_of: see KVPool."""
    blocks, offsets = np.divmod(slots, block_size)
    slots_in_parts: Ints = window_of[blocks] * block_size + offsets
    return slots_in_parts


def num_blocks(ends: Ints, block_size: int) -> Ints:
    """Return the number of blocks that positions [0, end) occupy, for each of `ends`."""
    return -(-ends // block_size)
