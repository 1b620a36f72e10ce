"""Rows of a pure decode step: the next token of each decoding sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.batch.rows import Ints
from engine.scheduler.sequence import Sequence

# R rows


class DecodingRows:
    """Decoding sequences in row order, with the per-row data that is constant while the set is the same.

    Immutable: steps read its lists and arrays, and must not change them.
    """

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self.sequences = list(sequences)
        self.decoding = [(one, 1) for one in self.sequences]  # for ScheduledStep.decoding
        self.sampling_rows = [one.sampling_row for one in self.sequences]
        self.masked = [one for one in self.sequences if one.sampling_row.mask is not None]
        # Only these rows can prevent async scheduling, so only they are checked in each step.
        self.readers = [row for row in self.sampling_rows if row.may_read_tokens]
        self.numbers_R = np.arange(len(self.sequences))
        self.ones_R = np.ones(len(self.sequences), dtype=np.int64)
        self.limits_R = np.array([one.ends_at for one in self.sequences], dtype=np.int64)
        self.block_size = self.sequences[0].block_size if self.sequences else 1


class NextTokens:
    """Plan of a step with one token per row: the last one, which may still be in flight."""

    def __init__(self, rows: DecodingRows) -> None:
        self.rows = rows
        # End position of each row; the step computes the token before it.
        self.ends_R: Ints = np.array(
            [len(row.tokens) + row.num_in_flight for row in rows.sampling_rows], dtype=np.int64
        )
        # Rows whose token is the first of a block, and the index of that block in their table.
        places_R, in_block_R = np.divmod(self.ends_R - 1, rows.block_size)
        beginning = np.flatnonzero(in_block_R == 0)
        self.first_of_blocks = list(zip(beginning.tolist(), places_R[beginning].tolist(), strict=True))

    @property
    def may_include_finished(self) -> bool:
        """Return True if some sequence ends with the token in flight."""
        return bool(np.count_nonzero(self.ends_R >= self.rows.limits_R))

    def token_ids(self) -> Ints:
        """Return the token ids (R,); 0 for a token in flight."""
        return np.array([0 if row.num_in_flight else row.tokens[-1] for row in self.rows.sampling_rows], dtype=np.int64)
