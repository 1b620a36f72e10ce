"""Interface of an autoregressive draft layer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.spec_decode.heads.deferred_kv import Entries

# T, N tokens, R rows, E hidden_size, W hidden states of a position, D draft vocabulary, P places of a draft, B blocks
# of the longest table


class DraftLayer(Protocol):
    """Layer that maps an entry, a token's embedding and the feature of the position before, to the next feature.

    The keys and values of an entry depend on the entry alone.
    """

    known_D: Tensor | None  # model ids of the draft vocabulary; None: the full vocabulary

    def attach(self, pool: KVPool, /) -> None:
        """Set the pool of its keys and values. Called first."""
        ...

    def features(self, hidden_TW: Tensor, /) -> Tensor:
        """Return the features (T, E) of positions from the model's hidden states, side by side."""
        ...

    def keep(self, entries: Entries, before_NE: Tensor, /) -> None:
        """Write the entries' KV to the pool. before: the feature before each."""
        ...

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor, /) -> Tensor:
        """Compute one entry of each row, and write its KV to the pool. Returns the next features, (R, E).

        They are valid until the next call. Places are computed in order, from 0.
        """
        ...

    def logits(self, feature_RE: Tensor, /) -> Tensor:
        """Return the logits (R, D) fp32 of the token after the entry's, from the last call's features."""
        ...


class DraftPlaces(NamedTuple):
    """Positions of a draft's entries, from each row's last token on."""

    positions_PR: Ints
    tables_RB: Ints  # with a block for each of these
    block_size: int

    @classmethod
    def behind(cls, positions_R: Ints, num_places: int, *, tables_RB: Ints, block_size: int) -> DraftPlaces:
        """Return `num_places` places from these positions on."""
        return cls(positions_R + np.arange(num_places)[:, None], tables_RB, block_size)

    @property
    def slots_PR(self) -> Ints:
        """KV slots of the entries."""
        blocks_PR, offsets_PR = np.divmod(self.positions_PR, self.block_size)
        slots_PR: Ints = self.tables_RB[np.arange(len(self.tables_RB)), blocks_PR] * self.block_size + offsets_PR
        return slots_PR

    def batch(self, place: int) -> Batch:
        """Return the entries of one place as a batch without token ids."""
        return Batch.of_next_tokens(self.tables_RB, self.positions_PR[place], block_size=self.block_size)
