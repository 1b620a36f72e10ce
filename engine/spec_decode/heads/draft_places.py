"""Where the entries of a draft are, of some rows: what a layer that drafts token after token is told once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.batch.batch import Batch
from engine.batch.rows import Ints

# P places of a draft, R rows, B blocks of the longest table


class DraftPlaces(NamedTuple):
    """Of each row the positions from its last token on."""

    positions_PR: Ints
    tables_RB: Ints  # with a block for each of these
    block_size: int

    @classmethod
    def behind(cls, positions_R: Ints, num_places: int, *, tables_RB: Ints, block_size: int) -> DraftPlaces:
        """So many, from these positions on: of the token that each row has, and of those behind it."""
        return cls(positions_R + np.arange(num_places)[:, None], tables_RB, block_size)

    @property
    def slots_PR(self) -> Ints:
        """Of the entries' KV."""
        blocks_PR, offsets_PR = np.divmod(self.positions_PR, self.block_size)
        slots_PR: Ints = self.tables_RB[np.arange(len(self.tables_RB)), blocks_PR] * self.block_size + offsets_PR
        return slots_PR

    def batch(self, place: int) -> Batch:
        """The entries of one place, as a step's. Which tokens they are of is not said."""
        return Batch.of_next_tokens(self.tables_RB, self.positions_PR[place], block_size=self.block_size)
