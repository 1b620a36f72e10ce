"""The next token of each sequence that decodes: what most steps compute, and nothing beside."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.batch.rows import Ints
from engine.scheduler.sequence import Sequence

# R rows


class DecodingRows:
    """Sequences that decode, in their order, and what stays as it is while it is these: a step asks it of all of them
    at once. Never changed; its lists and arrays belong to nobody else."""

    def __init__(self, sequences: Seq[Sequence]) -> None:
        self.sequences = list(sequences)
        self.decoding = [(one, 1) for one in self.sequences]  # as a ScheduledStep has them
        self.sampling_rows = [one.sampling_row for one in self.sequences]
        self.masked = [one for one in self.sequences if one.sampling_row.mask is not None]
        # Those that a step may have to wait for before the next is planned; of the others none is asked.
        self.readers = [row for row in self.sampling_rows if row.may_read_tokens]
        self.numbers_R = np.arange(len(self.sequences))
        self.ones_R = np.ones(len(self.sequences), dtype=np.int64)
        self.limits_R = np.array([one.ends_at for one in self.sequences], dtype=np.int64)
        self.block_size = self.sequences[0].block_size if self.sequences else 1


class NextTokens:
    """A row of one token for each of these, planned when so many tokens were known, or coming."""

    def __init__(self, rows: DecodingRows) -> None:
        self.rows = rows
        # Where each row ends: its last token is the one that is computed.
        self.ends_R: Ints = np.array(
            [len(row.tokens) + row.num_in_flight for row in rows.sampling_rows], dtype=np.int64
        )
        # The rows whose token is the first of a block, and which one of their table that is.
        places_R, in_block_R = np.divmod(self.ends_R - 1, rows.block_size)
        beginning = np.flatnonzero(in_block_R == 0)
        self.first_of_blocks = list(zip(beginning.tolist(), places_R[beginning].tolist(), strict=True))

    @property
    def may_be_over(self) -> bool:
        """One of them ends with the token that is coming."""
        return bool(np.count_nonzero(self.ends_R >= self.rows.limits_R))

    def token_ids(self) -> Ints:
        """(R,) 0 for one that is coming."""
        return np.array([0 if row.num_in_flight else row.tokens[-1] for row in self.rows.sampling_rows], dtype=np.int64)
