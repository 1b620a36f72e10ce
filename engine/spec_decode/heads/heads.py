"""Heads that draft from the model's hidden states, as a rank has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.model.draft_heads import STEPS_KEPT
from engine.batch.batch import Batch
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.spec_decode.heads.features import Features
from engine.spec_decode.heads.head_row import Choose, HeadRow

# T tokens of a step, R rows, V vocabulary, E hidden_size


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
        return STEPS_KEPT * self.max_rows

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

    def follow(
        self, batch: Batch, aux_hidden_states: AuxHiddenStates, on_layer: Callable[[int], None] | None, /
    ) -> None:
        """A step has been computed: remember what drafts will need, and put into the pool what the heads keep of its
        tokens; with on_layer now, else perhaps not before `settle`. on_layer: as of ModelRunner.forward, for their own
        layers."""
        ...

    def rest(self, num_first: int | None, /) -> None:
        """Nobody has had anything of them for a while, and will ask at most within so many first tokens of answers.
        They may then stop to gather what drafts will need of sequences that decode, and have nothing to say of these
        any more, also later. None: they are asked at any time."""
        ...

    def pass_over(self, batch: Batch, on_layer: Callable[[int], None] | None, /) -> bool:
        """Before a step is computed: whether they want nothing of it, and are not to `follow` it."""
        ...

    def settle(self) -> None:
        """All that steps have computed is in the pool then, and in `features`, or is passed over."""
        ...

    def knows(self, rows: Sequence[HeadRow], /) -> bool:
        """Whether they have seen what these rows go on from."""
        ...

    def num_behind(self, row: HeadRow, /) -> int | None:
        """Tokens of it that are put into the pool only because somebody asks what follows; None: they know nothing."""
        ...

    def catch_up(self, rows: Sequence[HeadRow], max_tokens: int | None = None, /) -> None:
        """Put the first so many of these there, or all."""
        ...

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose, /) -> None:
        """What follows each, place after place, as far as the heads go: `choose` keeps it. Nothing of rows of which
        they know nothing."""
        ...
