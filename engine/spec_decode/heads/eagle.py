"""Drafts of a decoder layer beside the model, which goes on from its own output: EAGLE-1 and 3, and DeepSeek-V3's MTP.

    feature  what the model has made of a position: which of its hidden states, says the layer (DraftLayer)
    entry    at slot t: token t, and the feature of position t - 1; at slot 0, where nothing is before, zeros
    layer    makes of the entry at t what stands for the feature of t, and says of that what token t + 1 is
    next     while it drafts, that takes the feature's place

So what slot t keeps follows from the tokens up to t, as in every other layer; the layer is one more of the KV pool, and
whoever ships, stores or finds a block has it along. Keys and values of a step's tokens are put there by the step, or
later (`LateEntries`); all the rest is computed only where a draft is asked for. Published layers are trained without an
entry at slot 0: it is one more key.

Where it is hardly ever worth asking (`rest`), tokens of answers wait until somebody asks: of each sequence the first
ones, as many as may be asked about, perhaps none. What is behind these, or would have to be there for somebody else, is
passed over: nothing is drafted behind it any more (Features). Then steps do nothing for the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.runner import streams
from engine.spec_decode.heads.deferred_kv import Entries, LateEntries, side_by_side
from engine.spec_decode.heads.draft_layer import DraftLayer, DraftPlaces
from engine.spec_decode.heads.features import UNKNOWN, Features, going_on, list_before
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.spec_decode.heads.heads import HeadsRoom

# N tokens, M of these, F those before which none of them is, K rows of features, R rows, B blocks of the longest
# table, E hidden_size

_ENOUGH = 64  # tokens that wait before they are computed together
_MOST = 512  # while nobody asks


class Eagle:
    """Implements DraftHeads."""

    def __init__(
        self, layer: DraftLayer, aux_hidden_states: tuple[int, ...], model: ModelConfig, room: HeadsRoom
    ) -> None:
        """taps: the hidden states that the layer wants."""
        self.layers = aux_hidden_states
        self._layer = layer
        self._room = room
        self._index = model.num_layers
        self._hidden_size = model.hidden_size

    def attach(self, pool: KVPool) -> None:
        """pool: with a spare block for every row that is asked about at a time."""
        self._layer.attach(pool)
        self._can_wait = self._room.can_wait
        self._num_first: int | None = None
        self._late = LateEntries(pool.num_blocks * pool.layout.block_size, block_size=pool.layout.block_size)
        self.features = Features(
            pool, dim=self._hidden_size, dtype=self._room.reader.dtype, capacity=self._room.num_places
        )
        self._pool = pool

    def rest(self, num_first: int | None) -> None:
        self._num_first = num_first if self._can_wait else None

    def pass_over(self, batch: Batch, on_layer: Callable[[int], None] | None) -> bool:
        if self._num_first is None or on_layer is not None or not batch.wants_all_logits:
            return False
        slots = batch.slots.tolist()
        if self._num_first and not self._are_over(batch, slots):
            return False
        self._late.forget(slots)
        self.features.pass_over(slots)
        return True

    def follow(self, batch: Batch, aux_hidden_states: AuxHiddenStates, on_layer: Callable[[int], None] | None) -> None:
        if self._can_wait and batch.wants_all_logits and on_layer is None:
            self._late.add(batch, side_by_side(aux_hidden_states, self.layers), self._takes)
            if len(self._late) >= (_ENOUGH if self._num_first is None else _MOST):
                self.settle()
            return
        self.settle()
        entries = Entries.of(batch, aux_hidden_states, self.layers, block_size=self._pool.layout.block_size)
        over = self._behind_what_is_over(batch, entries)
        self._put(entries, going_on(batch))
        self.features.pass_over(over)
        if on_layer is not None:
            on_layer(self._index)

    def settle(self) -> None:
        if self._num_first is not None:
            self.features.pass_over(self._late.drop())
        elif entries := self._late.take():
            self._put(entries)

    def knows(self, rows: Sequence[HeadRow]) -> bool:
        return self.features.knows(rows, self._late.has)

    def num_behind(self, row: HeadRow) -> int | None:
        if not self.knows([row]):
            return None
        return 0 if self._num_first is None else len(self._late.up_to(*self.features.slots_before([row])))

    def catch_up(self, rows: Sequence[HeadRow], max_tokens: int | None = None) -> None:
        slots = [slot for before in self.features.slots_before(rows) for slot in self._late.up_to(before)[:max_tokens]]
        if entries := self._late.take(slots):
            # Whoever goes on from others has gone: so much has no place in the ring.
            is_last_N = ~np.isin(entries.slots_N, entries.before_N)
            self._put(entries, np.flatnonzero(is_last_N))

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """At most a block of tokens of at most `max_rows` rows: so much is spare."""
        pool, size, most_rows = self._pool, self._pool.layout.block_size, self._room.max_rows
        if self._num_first is None:
            self.settle()
        else:
            self.catch_up(rows[:most_rows])
        known, feature_RE = self.features.before(rows[:most_rows])
        if not known:
            return
        asked = [rows[i] for i in known]
        # What is beyond a row's own blocks is written behind the pool.
        tables = [[*row.blocks[: row.position // size + 1], pool.num_blocks + i] for i, row in enumerate(asked)]
        width = max(map(len, tables))
        tables_RB = np.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=np.int64)
        positions_R = np.array([row.position for row in asked], dtype=np.int64)
        token_ids: Sequence[int] = [row.token_id for row in asked]
        num_places = min(max_tokens, size)
        places = DraftPlaces.behind(positions_R, num_places, tables_RB=tables_RB, block_size=size)
        for place in range(num_places):
            token_ids_R = self._on_device(token_ids)
            feature_RE = self._layer(places, place, token_ids_R, feature_RE)
            token_ids = choose(HeadLogits(self._layer.logits(feature_RE), self._layer.known_D), known, place)

    def _are_over(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Whether all its rows are passed over."""
        befores = list_before(batch, slots, batch.positions.tolist(), block_size=self._pool.layout.block_size)
        if len(befores) > len(batch.query_lens):  # with drafts: the first of each row says what becomes of it
            befores = [befores[i] for i in (np.cumsum(batch.query_lens) - batch.query_lens).tolist()]
        return all(map(self._is_over, befores))

    def _is_over(self, before: int) -> bool:
        """Whether what goes on there is passed over."""
        if self._num_first is not None and self._late.most_up_to(before) >= self._num_first:
            return True
        return self._is_passed_over(before)

    def _is_passed_over(self, before: int) -> bool:
        return before != UNKNOWN and not self._late.has(before) and self.features.is_passed_over(before)

    def _takes(self, slot: int, before: int) -> bool:
        """Whether a token waits; else it is passed over."""
        if self._is_over(before):
            self.features.pass_over((slot,))
            return False
        self.features.take_up(slot)
        return True

    def _behind_what_is_over(self, batch: Batch, entries: Entries) -> list[int]:
        """The slots of those rows. Nothing waits."""
        if not self._can_wait:
            return []
        firsts_R = np.cumsum(batch.query_lens) - batch.query_lens
        is_over_R = [self._is_passed_over(before) for before in entries.before_N[firsts_R].tolist()]
        over: list[int] = entries.slots_N[np.repeat(is_over_R, batch.query_lens)].tolist() if any(is_over_R) else []
        return over

    def _put(self, entries: Entries, going_on_M: Ints | None = None) -> None:
        """Into the pool. Sequences may go on from so many of them; None: from all."""
        slots_N = entries.slots_N
        self.features.take_up(slots_N)
        feature_NE = self._layer.features(entries.hidden_NW)
        self._layer.keep(entries, self._before(entries, feature_NE))
        self.features.keep_ends(slots_N, feature_NE)
        if going_on_M is not None:
            slots_N, feature_NE = slots_N[going_on_M], feature_NE[self._on_device(going_on_M)]
        self.features.keep(slots_N, feature_NE)

    def _before(self, entries: Entries, feature_NE: Tensor) -> Tensor:
        """The feature before each, of these or of what is known; zeros where nothing is, and before the first
        position."""
        places_N = self._late.places(entries.slots_N, entries.before_N)
        first_F = np.flatnonzero(places_N == UNKNOWN)
        first_FE = self.features.read(self.features.places(entries.before_N[first_F].tolist()))
        known_KE, places_N = torch.cat((first_FE, feature_NE)), places_N + len(first_F)
        places_N[first_F] = np.arange(len(first_F))
        if (places_N == np.arange(len(places_N))).all():  # mostly: of one sequence, in order
            return known_KE[: len(places_N)]
        return known_KE[self._on_device(places_N)]

    def _on_device(self, numbers: Sequence[int] | Ints) -> Tensor:
        return streams.upload_indices(numbers, self._pool.device)
