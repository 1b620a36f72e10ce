"""One layer that drafts by going on from its own output."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.kv.pool import KVPool
from engine.spec_decode.heads.deferred_kv import Entries
from engine.spec_decode.heads.draft_places import DraftPlaces

# T, N tokens, R rows, E hidden_size, W hidden states of a position, D tokens that the layer knows


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
