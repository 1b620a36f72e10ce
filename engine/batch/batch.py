"""One step's work, as every rank of a replica sees it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# T tokens of this step, R sequences (rows), B blocks of the longest table


@dataclass(slots=True, kw_only=True)
class Row:
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
class Batch:
    """The rows of one step, flattened. All arrays are int64, on the host."""

    token_ids: Ints  # (T,)
    positions: Ints  # (T,)
    slots: Ints  # (T,) where each token's KV goes: block id * block_size + offset
    query_lens: Ints  # (R,) tokens of each row; they sum to T
    context_lens: Ints  # (R,) tokens each row attends to in the end: its `end`
    block_tables: Ints  # (R, B) padded with 0
    adapters: Ints  # (R,)
    logits_rows: Ints  # indices into T of the positions whose logits are wanted, row by row

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> Batch:
        """Flatten `rows`, in order."""
        # One row of numbers for each of the batch: numpy takes them all at once, and each array apart would cost more.
        numbers = [(len(row.token_ids), row.start, row.num_logits, row.adapter) for row in rows]
        query_lens, starts, num_logits, adapters = np.array(numbers, dtype=np.int64).T.copy()
        context_lens = starts + query_lens
        counts = (-(-context_lens // block_size)).tolist()
        tables = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for i, row in enumerate(rows):
            tables[i, : counts[i]] = row.blocks[: counts[i]]
        ends = np.cumsum(query_lens)  # in the batch
        row_of_token = np.repeat(np.arange(len(rows)), query_lens)
        num_tokens = int(ends[-1])
        positions = np.arange(num_tokens) + np.repeat(context_lens - ends, query_lens)
        slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size
        assert (num_logits <= query_lens).all(), "logits of a position that is not computed"
        skipped = ends - np.cumsum(num_logits)  # up to each row's end, positions without logits
        return cls(
            token_ids=np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens),
            positions=positions,
            slots=slots,
            query_lens=query_lens,
            context_lens=context_lens,
            block_tables=tables,
            adapters=adapters,
            logits_rows=np.repeat(skipped, num_logits) + np.arange(num_logits.sum()),
        )

    def encode(self) -> NDArray[np.int64]:
        """All of it as one int64 array for the ranks that follow: T, R, B, how many logits rows, then the arrays."""
        header = np.array([len(self.token_ids), *self.block_tables.shape, len(self.logits_rows)])
        flat = (self.token_ids, self.positions, self.slots, self.query_lens, self.context_lens, self.adapters)
        return np.concatenate([header, *flat, self.block_tables.ravel(), self.logits_rows])

    @classmethod
    def decode(cls, data: NDArray[np.int64]) -> Batch:
        """The inverse of `encode`. Raises ValueError for what no batch makes; its numbers may still be any."""
        tokens, rows, blocks, logits = (int(n) for n in data[:4])
        sizes = (tokens, tokens, tokens, rows, rows, rows, rows * blocks, logits)
        if min(tokens, rows, blocks, logits) < 0 or sum(sizes) != len(data) - 4:
            raise ValueError(f"{len(data)} numbers are no batch of {tokens} tokens, {rows} rows and {blocks} blocks")
        parts = np.split(data[4:], np.cumsum(sizes)[:-1])
        return cls(
            token_ids=parts[0],
            positions=parts[1],
            slots=parts[2],
            query_lens=parts[3],
            context_lens=parts[4],
            adapters=parts[5],
            block_tables=parts[6].reshape(rows, blocks),
            logits_rows=parts[7],
        )
