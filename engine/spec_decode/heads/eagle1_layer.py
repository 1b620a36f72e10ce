"""EAGLE-1 layer over the model's last hidden state. Li et al. 2024, arXiv:2401.15077; EAGLE-2 uses the same heads.

    f(t)   the model's last hidden state of position t, normed, as its head reads it
    entry  of token t: fc of the embedding of token t and f(t - 1), side by side
    layer  a Llama layer without the norm before attention; the logits of token t + 1 are the model's head of its x
    next   its own x, in the place of f

Embedding and head are the model's, which the layer was trained with: copies in the checkpoint are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from engine.kv.pool import KVPool
from engine.spec_decode.heads.decoder_block import DecoderBlock, expected_tensors
from engine.spec_decode.heads.deferred_kv import Entries
from engine.spec_decode.heads.draft_layer import DraftPlaces
from engine.spec_decode.heads.heads import HeadsRoom
from engine.weights.checkpoint import check_tensors

# T tokens of a step, R rows, E hidden_size

_LAYER = "layers.0"
_COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})


class Eagle1Layer:
    """DraftLayer of EAGLE-1."""

    known_D: Tensor | None = None

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the head. Raises SpecError if it does not fit config.json or the model."""
        reader, shape = room.reader, config.shape
        assert shape is not None
        found, hidden = reader.checkpoint.shapes, shape.hidden_size
        expected = {**expected_tensors(shape, _LAYER, entry_size=hidden), "fc.weight": (hidden, 2 * hidden)}
        # config.json does not list the biases.
        has_bias, has_qkv_bias = "fc.bias" in found, f"{_LAYER}.self_attn.q_proj.bias" in found
        biased = ["fc"] * has_bias + [f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"] * has_qkv_bias
        expected |= {f"{name}.bias": expected[f"{name}.weight"][:1] for name in biased}
        check_tensors(reader.checkpoint, expected, optional=_COPIES)
        self._model = room.model
        self._join = reader.linear({"fc": (0, hidden)}, has_bias=has_bias)
        self._block = DecoderBlock.read(reader, shape, _LAYER, index=len(model.kv_layers), has_bias=has_qkv_bias)

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def features(self, hidden_TW: Tensor) -> Tensor:
        return self._model.norm(hidden_TW)

    def keep(self, entries: Entries, before_NE: Tensor) -> None:
        entry_NE = self._entry(entries.token_ids_N, before_NE)
        self._block.keep(self._pool, entries.slots_N, entries.positions_N, entry_NE)

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        entry_RE = self._entry(token_ids_R, before_RE)
        return self._block(places.batch(place), self._pool, entry_RE, entry_RE)

    def logits(self, feature_RE: Tensor) -> Tensor:
        return self._model.head(feature_RE)

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """(T, E)"""
        return self._join(torch.cat((self._model.embed(token_ids_T), before_TE), dim=-1))
