"""One layer that drafts by going on from its own output."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.spec_decode.heads.deferred_kv import Entries

# T, N tokens, R rows, E hidden_size, W hidden states of a position, D tokens that the layer knows
# P places of a draft, B blocks of the longest table


class DraftLayer(Protocol):
    """Of an entry for each token: of its embedding, and what is known of the position before it, its feature.

    What it makes of an entry is the next feature. Its keys and values follow from the entry alone.
    """

    known_D: Tensor | None  # which of the model's tokens are its own; None: they are the same

    def attach(self, pool: KVPool, /) -> None:
        """Before anything else: where its keys and values are."""
        ...

    def features(self, hidden_TW: Tensor, /) -> Tensor:
        """Of positions that the model has computed, (T, E), from the hidden states that are wanted of them, side by
        side."""
        ...

    def keep(self, entries: Entries, before_NE: Tensor, /) -> None:
        """Put what attention needs of them into the pool. before: the features before each."""
        ...

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor, /) -> Tensor:
        """Of one entry of each row, which is put into the pool there: the features that follow, (R, E), good until the
        next call. Places are asked for in order, from 0 on."""
        ...

    def logits(self, feature_RE: Tensor, /) -> Tensor:
        """Of the token behind the next one, from what the last call gave: (R, D) fp32."""
        ...


class DraftPlaces(NamedTuple):
    """Positions of a draft's entries: of each row those from its last token on."""

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
