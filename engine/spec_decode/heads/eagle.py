"""Autoregressive draft heads on a decoder layer: EAGLE-1 and 3, and DeepSeek-V3's MTP.

    feature  the model's output at a position; DraftLayer defines which hidden states
    entry    at slot t: token t, and the feature of position t - 1 (zeros at position 0)
    layer    maps the entry at t to an approximation of the feature of t, and that to the logits of token t + 1
    next     while drafting, the approximation takes the feature's place

The content of slot t depends on the tokens up to t, as in any other layer. So the layer is one more layer of the KV
pool, and its KV is shipped, stored and matched with the block. The KV of a step's tokens is written by the step, or
later (`DeferredEntries`); everything else is computed only when a draft is requested. Published layers are trained
without an entry at slot 0; here that entry is one more key.

If drafts rarely pay (`rest`), only the first tokens of each answer are deferred, perhaps none. Later tokens, and tokens
whose KV another component needs, are passed over: nothing is drafted behind them any more (Features), and steps do no
work for the layer.
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
from engine.spec_decode.heads.deferred_kv import DeferredEntries, Entries, side_by_side
from engine.spec_decode.heads.draft_layer import DraftLayer, DraftPlaces
from engine.spec_decode.heads.features import UNKNOWN, Features, continuable, list_before
from engine.spec_decode.heads.head_row import Choose, HeadLogits, HeadRow
from engine.spec_decode.heads.heads import HeadsRoom

# N tokens, M a subset, F tokens whose predecessor is not among them, K rows of features, R rows, B blocks of the
# longest table, E hidden_size

_ENOUGH = 64  # deferred tokens that are computed together
_MOST = 512  # the same while resting


class Eagle:
    """DraftHeads of one autoregressive layer."""

    def __init__(
        self, layer: DraftLayer, aux_hidden_states: tuple[int, ...], model: ModelConfig, room: HeadsRoom
    ) -> None:
        """aux_hidden_states: the model's layers whose hidden states the draft layer reads."""
        self.layers = aux_hidden_states
        self._layer = layer
        self._room = room
        self._index = len(model.kv_layers)
        self._hidden_size = model.hidden_size

    def attach(self, pool: KVPool) -> None:
        """Set the pool, which has a spare block for every row of a `draft` call."""
        self._layer.attach(pool)
        self._can_wait = self._room.can_wait
        self._num_first: int | None = None
        self._deferred = DeferredEntries(pool.num_blocks * pool.layout.block_size, block_size=pool.layout.block_size)
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
        if self._num_first and not self._are_passed_over(batch, slots):
            return False
        self._deferred.forget(slots)
        self.features.pass_over(slots)
        return True

    def follow(self, batch: Batch, aux_hidden_states: AuxHiddenStates, on_layer: Callable[[int], None] | None) -> None:
        if self._can_wait and batch.wants_all_logits and on_layer is None:
            self._deferred.add(batch, side_by_side(aux_hidden_states, self.layers), self._accepts)
            if len(self._deferred) >= (_ENOUGH if self._num_first is None else _MOST):
                self.settle()
            return
        self.settle()
        entries = Entries.of(batch, aux_hidden_states, self.layers, block_size=self._pool.layout.block_size)
        over = self._slots_passed_over(batch, entries)
        self._put(entries, continuable(batch))
        self.features.pass_over(over)
        if on_layer is not None:
            on_layer(self._index)

    def settle(self) -> None:
        if self._num_first is not None:
            self.features.pass_over(self._deferred.drop())
        elif entries := self._deferred.take():
            self._put(entries)

    def knows(self, rows: Sequence[HeadRow]) -> bool:
        return self.features.knows(rows, self._deferred.has)

    def num_behind(self, row: HeadRow) -> int | None:
        if not self.knows([row]):
            return None
        return 0 if self._num_first is None else len(self._deferred.up_to(*self.features.slots_before([row])))

    def catch_up(self, rows: Sequence[HeadRow], max_tokens: int | None = None) -> None:
        slots = [
            slot for before in self.features.slots_before(rows) for slot in self._deferred.up_to(before)[:max_tokens]
        ]
        if entries := self._deferred.take(slots):
            # Only sequence ends need a place in the ring: other sequences that continue from these tokens are gone.
            is_last_N = ~np.isin(entries.slots_N, entries.before_N)
            self._put(entries, np.flatnonzero(is_last_N))

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """Draft at most a block of tokens for at most `max_rows` rows, the capacity of the spare blocks."""
        pool, size, most_rows = self._pool, self._pool.layout.block_size, self._room.max_rows
        if self._num_first is None:
            self.settle()
        else:
            self.catch_up(rows[:most_rows])
        known, feature_RE = self.features.before(rows[:most_rows])
        if not known:
            return
        drafting = [rows[i] for i in known]
        # Tokens beyond a row's own blocks go to the spare blocks at the end of the pool.
        tables = [[*row.blocks[: row.position // size + 1], pool.num_blocks + i] for i, row in enumerate(drafting)]
        width = max(map(len, tables))
        tables_RB = np.array([[*table, *[0] * (width - len(table))] for table in tables], dtype=np.int64)
        positions_R = np.array([row.position for row in drafting], dtype=np.int64)
        token_ids: Sequence[int] = [row.token_id for row in drafting]
        num_places = min(max_tokens, size)
        places = DraftPlaces.behind(positions_R, num_places, tables_RB=tables_RB, block_size=size)
        for place in range(num_places):
            token_ids_R = self._on_device(token_ids)
            feature_RE = self._layer(places, place, token_ids_R, feature_RE)
            token_ids = choose(HeadLogits(self._layer.logits(feature_RE), self._layer.known_D), known, place)

    def _are_passed_over(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return True if all rows of the batch are passed over."""
        befores = list_before(batch, slots, batch.positions.tolist(), block_size=self._pool.layout.block_size)
        # With drafts, the first token of each row decides.
        if len(befores) > len(batch.query_lens):
            befores = [befores[i] for i in (np.cumsum(batch.query_lens) - batch.query_lens).tolist()]
        return all(map(self._continues_passed_over, befores))

    def _continues_passed_over(self, before: int) -> bool:
        """Return True if tokens after this slot are passed over."""
        if self._num_first is not None and self._deferred.max_up_to(before) >= self._num_first:
            return True
        return self._is_passed_over(before)

    def _is_passed_over(self, before: int) -> bool:
        return before != UNKNOWN and not self._deferred.has(before) and self.features.is_passed_over(before)

    def _accepts(self, slot: int, before: int) -> bool:
        """Return True if the token is deferred; otherwise mark it as passed over."""
        if self._continues_passed_over(before):
            self.features.pass_over((slot,))
            return False
        self.features.clear_passed_over(slot)
        return True

    def _slots_passed_over(self, batch: Batch, entries: Entries) -> list[int]:
        """Return the slots of the rows that continue a passed-over position. Requires that no token is deferred."""
        if not self._can_wait:
            return []
        firsts_R = np.cumsum(batch.query_lens) - batch.query_lens
        is_over_R = [self._is_passed_over(before) for before in entries.before_N[firsts_R].tolist()]
        over: list[int] = entries.slots_N[np.repeat(is_over_R, batch.query_lens)].tolist() if any(is_over_R) else []
        return over

    def _put(self, entries: Entries, continued_M: Ints | None = None) -> None:
        """Write entries to the pool. continued_M: those that sequences may continue from; None: all."""
        slots_N = entries.slots_N
        self.features.clear_passed_over(slots_N)
        feature_NE = self._layer.features(entries.hidden_NW)
        self._layer.keep(entries, self._before(entries, feature_NE))
        self.features.keep_ends(slots_N, feature_NE)
        if continued_M is not None:
            slots_N, feature_NE = slots_N[continued_M], feature_NE[self._on_device(continued_M)]
        self.features.keep(slots_N, feature_NE)

    def _before(self, entries: Entries, feature_NE: Tensor) -> Tensor:
        """Return the feature before each entry; zeros if unknown or at position 0."""
        places_N = self._deferred.places(entries.slots_N, entries.before_N)
        first_F = np.flatnonzero(places_N == UNKNOWN)
        first_FE = self.features.read(self.features.places(entries.before_N[first_F].tolist()))
        known_KE, places_N = torch.cat((first_FE, feature_NE)), places_N + len(first_F)
        places_N[first_F] = np.arange(len(first_F))
        # The usual case: tokens of one sequence, in order.
        if (places_N == np.arange(len(places_N))).all():
            return known_KE[: len(places_N)]
        return known_KE[self._on_device(places_N)]

    def _on_device(self, numbers: Sequence[int] | Ints) -> Tensor:
        return streams.upload_indices(numbers, self._pool.device)
