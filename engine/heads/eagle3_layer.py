"""EAGLE-3's layer: over three hidden states of the model, fused. Li et al. 2025, arXiv:2503.01840.

f(t)   the model's hidden states of position t after three of its layers, and fc of the three together
entry  of token t: norm(embedding of token t) and norm(f(t - 1)), side by side
layer  x = f + attention(entry); x + mlp(norm(x)); what it says of token t + 1 is head(norm(x))
next   its own x, not normed, in the place of f
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cluster.model.draft_heads import HeadsConfig
from cluster.model.shape import ModelConfig
from cluster.words.errors import SpecError
from engine.batch.batch import Batch
from engine.heads.decoder_block import DecoderBlock, expected_tensors
from engine.heads.heads import HeadsRoom
from engine.kv.pool import KVPool
from engine.model.taps import Taps
from engine.weights.checkpoint import Shape, check_tensors

# T tokens of a step, R rows, E hidden_size, D tokens that the head knows

_LAYER = "midlayer"


class Eagle3Layer:
    """Implements DraftLayer."""

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Reads the head. Raises SpecError if it does not fit config.json, or the model."""
        reader, shape = room.reader, config.shape
        assert shape is not None
        found = reader.checkpoint.shapes
        also = {"embed_tokens.weight": (model.vocab_size, shape.hidden_size), "d2t": (config.draft_vocab_size,)}
        expected = {**_expected(config, shape), **{name: size for name, size in also.items() if name in found}}
        check_tensors(found, expected, optional=frozenset({"t2d"}))
        eps = shape.rms_norm_eps
        self._taps = config.layers
        self._fuse = reader.linear({"fc": (0, shape.hidden_size)})
        self._embedding_norm = reader.norm(f"{_LAYER}.input_layernorm", eps)
        self._feature_norm = reader.norm(f"{_LAYER}.hidden_norm", eps)
        self._block = DecoderBlock.read(reader, shape, _LAYER, index=model.num_layers)
        self._norm = reader.norm("norm", eps)
        self._parallel, self._num_known = reader.parallel, config.draft_vocab_size
        self._head = reader.linear({"lm_head": reader.parallel.span(config.draft_vocab_size)})
        self._embed: Callable[[Tensor], Tensor] = room.model.embed
        if "embed_tokens.weight" in found:
            self._embed = reader.embedding("embed_tokens", model.vocab_size)
        self.known_D: Tensor | None = None
        if "d2t" in found:
            offsets_D = reader.checkpoint.read("d2t").long()
            self.known_D = (offsets_D + torch.arange(len(offsets_D))).to(reader.device)
            if not 0 <= int(self.known_D.min()) <= int(self.known_D.max()) < model.vocab_size:
                raise SpecError(f"d2t names tokens beyond the model's {model.vocab_size}")

    def features(self, taps: Taps) -> Tensor:
        return self._fuse(torch.cat([taps[layer] for layer in self._taps], dim=-1))

    def keep(self, batch: Batch, pool: KVPool, token_ids_T: Tensor, before_TE: Tensor) -> None:
        self._block.keep(batch, pool, self._entry(token_ids_T, before_TE))

    def __call__(self, batch: Batch, pool: KVPool, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        return self._block(batch, pool, self._entry(token_ids_R, before_RE), before_RE)

    def logits(self, feature_RE: Tensor) -> Tensor:
        return self._parallel.all_gather(self._head(feature_RE, before=self._norm), self._num_known).float()

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """(T, 2 E)"""
        return torch.cat((self._embedding_norm(self._embed(token_ids_T)), self._feature_norm(before_TE)), dim=-1)


def _expected(config: HeadsConfig, shape: ModelConfig) -> Mapping[str, Shape]:
    hidden = shape.hidden_size
    tensors = {
        **expected_tensors(shape, _LAYER, entry_size=2 * hidden),
        **{f"{_LAYER}.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")},
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    if config.draft_vocab_size != shape.vocab_size:
        tensors["d2t"] = (config.draft_vocab_size,)
    return tensors
