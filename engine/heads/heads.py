"""Heads that draft from the model's hidden states, as a rank has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.batch.batch import Batch
from engine.heads.features import Features
from engine.heads.head_row import Choose, HeadRow
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.taps import Taps

# T tokens of a step, R rows, V vocabulary, E hidden_size

_STEPS_KEPT = 4


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Of the model that is drafted for."""

    embed: Callable[[Tensor], Tensor]  # token ids (T,) -> (T, E)
    norm: Callable[[Tensor], Tensor]  # the last one
    logits: Callable[[Tensor], Tensor]  # hidden states (R, E), not normed -> (R, V) fp32
    head: Callable[[Tensor], Tensor]  # the same of what has been normed


@dataclass(frozen=True, kw_only=True)
class HeadsRoom:
    """What heads are put together with."""

    reader: ShardReader  # of their own checkpoint
    model: ModelParts
    max_rows: int  # that are asked about at a time

    @property
    def num_places(self) -> int:
        """For features of positions that sequences may go on from."""
        return _STEPS_KEPT * self.max_rows

    @property
    def can_wait(self) -> bool:
        """Whether what a step has computed may be put into the pool later: where nobody else would have to, too."""
        return self.reader.device.type == "cpu" and self.reader.parallel.size == 1


class DraftHeads(Protocol):
    """One kind of heads. Owned by the step thread."""

    features: Features  # from `attach` on
    layers: tuple[int, ...]  # of the model: see Taps

    def attach(self, pool: KVPool, /) -> None:
        """Before anything else: what the heads keep is kept there."""
        ...

    def follow(self, batch: Batch, taps: Taps, on_layer: Callable[[int], None] | None, /) -> None:
        """A step has been computed: remember what drafts will need, and put into the pool what the heads keep of its
        tokens; with on_layer now, else perhaps not before `settle`. on_layer: as of ModelRunner.forward, for their own
        layers."""
        ...

    def settle(self) -> None:
        """All that steps have computed is in the pool then, and in `features`."""
        ...

    def knows(self, rows: Sequence[HeadRow], /) -> bool:
        """Whether they have seen what these rows go on from."""
        ...

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose, /) -> None:
        """What follows each, place after place, as far as the heads go: `choose` keeps it. Nothing of rows of which
        they know nothing."""
        ...
