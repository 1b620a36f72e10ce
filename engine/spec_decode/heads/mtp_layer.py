"""Multi-token prediction layer of DeepSeek-V3 and V3.2, GLM-4.5 to 5, Qwen3-Next, Qwen3.5 and Nemotron 3.

DeepSeek-V3, arXiv:2412.19437, section 2.2:

    f(t)   the model's last hidden state of position t, normed, as its head reads it
    entry  of token t: enorm(embedding of token t) and hnorm(f(t - 1)), side by side, through eh_proj
    layer  one more layer of the model (Nemotron: one with attention, one with experts); the logits of token t + 1
           are the model's head of shared_head.norm(x)
    next   shared_head.norm(x), in the place of f

The paper leaves open whether f is normed; it is in Megatron, SGLang and TensorRT-LLM. Embedding and head are the
model's: those in the checkpoint are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from engine.attention.latent_heads import Rotation, TorchLatentHeads
from engine.attention.rotary import Rotary
from engine.attention.triton_latent_heads import KernelLatentHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.layers.residual import Residual
from engine.model import layer_kinds
from engine.model.decoder_layer import DecoderLayer
from engine.model.latent_layer import LatentLayer
from engine.model.layer_kinds import MLPLayer
from engine.model.norms import read_norm
from engine.runner import streams
from engine.spec_decode.heads.deferred_kv import Entries
from engine.spec_decode.heads.draft_layer import DraftPlaces, heads_of
from engine.spec_decode.heads.heads import HeadsRoom
from engine.weights.checkpoint import Shape, check_tensors

# T tokens of a step, R rows, E hidden_size


class MtpLayer:
    """DraftLayer that is one more layer of the model."""

    known_D: Tensor | None = None

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the layer from the model's own checkpoint. Raises SpecError if it does not fit config.json."""
        reader, shape, index = room.reader, config.shape, model.num_layers
        assert shape is not None
        prefix = f"model.layers.{index}"
        copies = frozenset({f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"})
        prefixes = tuple(f"model.layers.{i}." for i in range(index, shape.num_layers))
        check_tensors(reader.checkpoint, _expected(shape, index), optional=copies, prefix=prefixes)
        self._model = room.model
        self._is_rotated = shape.layers[index].rope is not None
        self._is_interleaved = shape.ropes[0].is_interleaved
        self._scale = shape.attention_scale(index)
        self._embedding_norm = read_norm(reader, shape, f"{prefix}.enorm")
        self._feature_norm = read_norm(reader, shape, f"{prefix}.hnorm")
        self._join = reader.linear({f"{prefix}.eh_proj": (0, shape.hidden_size)})
        self._layer = (LatentLayer if shape.latent else DecoderLayer).read(reader, shape, index)
        self._mlp_layer = MLPLayer.read(reader, shape, index + 1) if shape.num_layers > index + 1 else None
        self._kernels = reader.kernels
        self._norm = read_norm(reader, shape, f"{prefix}.shared_head.norm")
        self._rotary = Rotary(shape.ropes[0], reader.device)

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def features(self, hidden_TW: Tensor) -> Tensor:
        return self._model.normed(hidden_TW)

    def keep(self, entries: Entries, before_NE: Tensor) -> None:
        x_NE = self._entry(entries.token_ids_N, before_NE)
        x, slots_N = Residual(x_NE, adds_late=False), streams.upload_indices(entries.slots_N, x_NE.device)
        cos_N1F, sin_N1F = self._angles(entries.positions_N, x_NE)
        if isinstance(self._layer, LatentLayer):
            self._layer.keep(x, self._pool, slots_N, Rotation(cos_N1F, sin_N1F, self._is_interleaved))
        else:
            self._layer.keep(x, self._pool, slots_N, cos_N1F, sin_N1F)

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        batch, x_RE = places.batch(place), self._entry(token_ids_R, before_RE)
        x, heads = Residual(x_RE, adds_late=False), self._heads(batch, *self._angles(batch.positions, x_RE))
        self._layer.finish(x, self._layer.store(x, heads), heads)
        if self._mlp_layer:
            self._mlp_layer(x)
        return self._norm(x.total())

    def logits(self, feature_RE: Tensor) -> Tensor:
        return self._model.head(feature_RE)

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """Return the layer's input (T, E): embeddings joined with the features before them."""
        embedded_TE = self._embedding_norm(self._model.embed(token_ids_T))
        return self._join(torch.cat((embedded_TE, self._feature_norm(before_TE)), dim=-1))

    def _angles(self, positions_N: Ints, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        cos_N1F, sin_N1F = self._rotary(streams.upload_indices(positions_N, x_NE.device), x_NE.dtype)
        return (cos_N1F, sin_N1F) if self._is_rotated else (cos_N1F[..., :0], sin_N1F[..., :0])

    def _heads(self, batch: Batch, cos_R1F: Tensor, sin_R1F: Tensor) -> Any:
        """Return the attention backend of the layer's kind."""
        pool = self._pool
        if isinstance(self._layer, DecoderLayer):
            return heads_of(self._kernels, batch, pool, [(cos_R1F, sin_R1F)] * (self._layer.attention.rope + 1))
        rotation = Rotation(cos_R1F, sin_R1F, self._is_interleaved)
        if pool.device.type == "cuda":
            return KernelLatentHeads(DeviceBatch.of(batch, pool.device), pool, rotation, scale=self._scale)
        return TorchLatentHeads(batch, pool, rotation, scale=self._scale)


def _expected(shape: ModelConfig, index: int) -> Mapping[str, Shape]:
    prefix, hidden = f"model.layers.{index}", shape.hidden_size
    tensors: dict[str, Shape] = {f"{prefix}.eh_proj.weight": (hidden, 2 * hidden)}
    tensors |= {f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    for layer in range(index, shape.num_layers):
        tensors |= layer_kinds.expected_tensors(shape, layer)
    return tensors
