"""Interface of draft heads on the model's hidden states, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.model.draft_heads import STEPS_KEPT
from engine.batch.batch import Batch
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.transformer import Transformer
from engine.spec_decode.heads.features import Features
from engine.spec_decode.heads.head_row import Choose, HeadRow


@dataclass(frozen=True, kw_only=True)
class HeadsRoom:
    """Resources and limits that heads are built with."""

    reader: ShardReader  # of the heads' checkpoint
    model: Transformer  # the served model
    max_rows: int  # rows per `draft` call

    @property
    def num_places(self) -> int:
        """Capacity for features of positions that sequences may continue from."""
        return STEPS_KEPT * self.max_rows

    @property
    def can_wait(self) -> bool:
        """True if draft KV may be deferred: on a CPU with a single rank."""
        return self.reader.device.type == "cpu" and self.reader.parallel.size == 1


class RankHeads(Protocol):
    """Draft heads with their state, of one rank or of all ranks of a replica."""

    def rest(self, num_first: int | None, /) -> None:
        """Announce that drafts are requested only within the first `num_first` tokens of answers, if at all.

        Heads may then stop collecting state of decoding sequences, and cannot draft for these afterwards. None: drafts
        may be requested at any time.
        """
        return None

    def num_behind(self, row: HeadRow, /) -> int | None:
        """Return the number of deferred tokens to compute before a draft; None if the row cannot be drafted for."""
        ...

    def catch_up(self, rows: Sequence[HeadRow], max_tokens: int | None = None, /) -> None:
        """Compute the first `max_tokens` deferred tokens of each row, or all."""
        return None

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose, /) -> None:
        """Draft for each row, place after place, as far as the heads go. Skips rows without state.

        `choose` picks the tokens of each place.
        """
        ...


class DraftHeads(RankHeads, Protocol):
    """Draft heads of one kind, on one rank. Owned by the step thread."""

    features: Features  # set by `attach`
    layers: tuple[int, ...]  # layers of the model whose hidden states are read, see AuxHiddenStates

    def attach(self, pool: KVPool, /) -> None:
        """Set the pool that the heads write to. Called first."""
        ...

    def follow(
        self, batch: Batch, aux_hidden_states: AuxHiddenStates, on_layer: Callable[[int], None] | None, /
    ) -> None:
        """Record a computed step, and write the heads' KV of its tokens to the pool.

        Without on_layer the write may be deferred until `settle`. on_layer: as in ModelRunner.forward, for the heads'
        layers.
        """
        ...

    def pass_over(self, batch: Batch, on_layer: Callable[[int], None] | None, /) -> bool:
        """Return True if the heads skip this step; the caller then must not call `follow` for it."""
        return False

    def settle(self) -> None:
        """Compute all deferred KV into the pool and `features`, or discard it while drafts rarely pay (`rest`)."""
        return None

    def knows(self, rows: Sequence[HeadRow], /) -> bool:
        """Return True if the heads have the state to draft for these rows."""
        ...
