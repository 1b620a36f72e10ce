"""One layer that drafts by going on from its own output."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.batch.batch import Batch
from engine.kv.pool import KVPool
from engine.model.taps import Taps

# T tokens of a step, R rows, E hidden_size, D tokens that the layer knows


class DraftLayer(Protocol):
    """Of an entry for each token: of its embedding, and what is known of the position before it, its feature.

    What it makes of an entry is the next feature. Its keys and values follow from the entry alone.
    """

    known_D: Tensor | None  # which of the model's tokens are its own; None: they are the same

    def features(self, taps: Taps, /) -> Tensor:
        """Of all positions of a step that the model has computed: (T, E)."""
        ...

    def keep(self, batch: Batch, pool: KVPool, token_ids_T: Tensor, before_TE: Tensor, /) -> None:
        """Put what attention needs of a step's entries into the pool. before: the features before each."""
        ...

    def __call__(self, batch: Batch, pool: KVPool, token_ids_R: Tensor, before_RE: Tensor, /) -> Tensor:
        """Of one entry of each row, which is put into the pool: the features that follow, (R, E)."""
        ...

    def logits(self, feature_RE: Tensor, /) -> Tensor:
        """Of the token behind the next one: (R, D) fp32."""
        ...
