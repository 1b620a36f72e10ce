"""Drafts of a decoder layer beside the model, which goes on from its own output: EAGLE-1 and 3, and DeepSeek-V3's MTP.

    feature  what the model has made of a position: which of its hidden states, says the layer (DraftLayer)
    entry    at slot t: token t, and the feature of position t - 1; at slot 0, where nothing is before, zeros
    layer    makes of the entry at t what stands for the feature of t, and says of that what token t + 1 is
    next     while it drafts, that takes the feature's place

So what slot t keeps follows from the tokens up to t, as in every other layer; the layer is one more of the KV pool, and
whoever ships, stores or finds a block has it along. A step puts keys and values of its tokens there; all the rest is
computed only where a draft is asked for. Published layers are trained without an entry at slot 0: it is one more key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.batch.rows import Ints, Row
from engine.heads.draft_layer import DraftLayer
from engine.heads.features import UNKNOWN, Features, begin_slots, going_on
from engine.heads.head_row import Choose, HeadRow
from engine.heads.heads import HeadsRoom
from engine.kv.pool import KVPool
from engine.model.taps import Taps

# T tokens of a step, R rows, E hidden_size, D tokens that the layer knows, V vocabulary

_NEVER = -1e30  # a logit: infinite ones are of models that have failed


class Eagle:
    """Implements DraftHeads."""

    def __init__(self, layer: DraftLayer, taps: tuple[int, ...], model: ModelConfig, room: HeadsRoom) -> None:
        """taps: the hidden states that the layer wants."""
        self.layers = taps
        self._layer = layer
        self._room = room
        self._index = model.num_layers
        self._hidden_size = model.hidden_size
        self._vocab_size = model.vocab_size

    def attach(self, pool: KVPool) -> None:
        """pool: with a spare block for every row that is asked about at a time."""
        self.features = Features(
            pool, dim=self._hidden_size, dtype=self._room.reader.dtype, capacity=self._room.num_places
        )
        self._pool = pool

    def follow(self, batch: Batch, taps: Taps, on_layer: Callable[[int], None] | None) -> None:
        pool, device = self._pool, self._pool.device
        feature_TE = self._layer.features(taps)
        begin_R = torch.from_numpy(np.cumsum(batch.query_lens) - batch.query_lens).to(device)
        before_TE = torch.roll(feature_TE, 1, dims=0)
        before_TE[begin_R] = self._read(begin_slots(batch, block_size=pool.layout.block_size))
        assert taps.token_ids_T is not None
        self._layer.keep(batch, pool, taps.token_ids_T, before_TE)
        if on_layer is not None:
            on_layer(self._index)
        last_N = going_on(batch)
        self.features.keep(batch.slots[last_N], feature_TE[torch.from_numpy(last_N).to(device)])
        self.features.keep_ends(batch.slots, feature_TE)

    def draft(self, rows: Sequence[HeadRow], max_tokens: int, choose: Choose) -> None:
        """At most a block of tokens of at most `max_rows` rows: so much is spare."""
        pool, size, most_rows = self._pool, self._pool.layout.block_size, self._room.max_rows
        known, feature_RE = self.features.before(rows[:most_rows])
        if not known:
            return
        asked = [rows[i] for i in known]
        # What is beyond a row's own blocks is written behind the pool.
        tables = [[*row.blocks[: row.position // size + 1], pool.num_blocks + i] for i, row in enumerate(asked)]
        token_ids: Sequence[int] = [row.token_id for row in asked]
        for place in range(min(max_tokens, size)):
            entries = [
                Row([0], start=row.position + place, blocks=table, num_logits=1)
                for row, table in zip(asked, tables, strict=True)
            ]
            token_ids_R = torch.tensor(token_ids, device=pool.device)
            feature_RE = self._layer(Batch.of(entries, block_size=size), pool, token_ids_R, feature_RE)
            token_ids = choose(self._logits(feature_RE), known, place)

    def _logits(self, feature_RE: Tensor) -> Tensor:
        """(R, V) fp32, of the model's tokens."""
        logits_RD, known_D = self._layer.logits(feature_RE), self._layer.known_D
        if known_D is None:
            return logits_RD
        logits_RV = torch.full((len(logits_RD), self._vocab_size), _NEVER, device=logits_RD.device)
        return logits_RV.index_copy_(1, known_D, logits_RD)

    def _read(self, slots_R: Ints) -> Tensor:
        """Zeros where nothing is known, and before the first position."""
        return self.features.read(np.where(slots_R == UNKNOWN, UNKNOWN, self.features.find(slots_R)))
