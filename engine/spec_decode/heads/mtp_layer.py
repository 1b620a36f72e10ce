"""Multi-token prediction layer of DeepSeek-V3 and GLM-4.5 to 4.7. DeepSeek-V3, arXiv:2412.19437, section 2.2.

    f(t)   the model's last hidden state of position t, normed, as its head reads it
    entry  of token t: enorm(embedding of token t) and hnorm(f(t - 1)), side by side, through eh_proj
    layer  one more layer of the model; the logits of token t + 1 are the model's head of shared_head.norm(x)
    next   that norm of its own x, in the place of f

The paper leaves open whether f is normed; it is in Megatron, SGLang and TensorRT-LLM. Embedding and head are the
model's: those in the checkpoint are copies.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from engine.attention.latent_heads import LatentHeads, Rotation, TorchLatentHeads
from engine.attention.rotary import Rotary
from engine.attention.triton_latent_heads import KernelLatentHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.layers.residual import Residual
from engine.model import decoder_layer, latent_layer
from engine.model.decoder_layer import DecoderLayer
from engine.model.latent_layer import LatentLayer
from engine.runner import streams
from engine.spec_decode.heads.decoder_block import heads_of
from engine.spec_decode.heads.deferred_kv import Entries
from engine.spec_decode.heads.draft_layer import DraftPlaces
from engine.spec_decode.heads.heads import HeadsRoom
from engine.weights.checkpoint import Shape, check_tensors

# T tokens of a step, R rows, E hidden_size


class MtpLayer:
    """DraftLayer of DeepSeek-V3 and GLM."""

    known_D: Tensor | None = None

    def __init__(self, config: HeadsConfig, model: ModelConfig, room: HeadsRoom) -> None:
        """Read the layer from the model's own checkpoint. Raises SpecError if it does not fit config.json."""
        reader, shape, index = room.reader, config.shape, model.num_layers
        assert shape is not None
        prefix, eps = f"model.layers.{index}", shape.rms_norm_eps
        copies = frozenset({f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"})
        check_tensors(reader.checkpoint, _expected(shape, index), optional=copies, prefix=f"{prefix}.")
        self._model = room.model
        self._is_interleaved = shape.ropes[0].is_interleaved
        self._scale = shape.attention_scale(index)
        self._embedding_norm = reader.norm(f"{prefix}.enorm", eps)
        self._feature_norm = reader.norm(f"{prefix}.hnorm", eps)
        self._join = reader.linear({f"{prefix}.eh_proj": (0, shape.hidden_size)})
        self._latent_layer = LatentLayer.read(reader, shape, index) if shape.latent else None
        self._decoder_layer = None if shape.latent else DecoderLayer.read(reader, shape, index)
        self._kernels = reader.kernels
        self._norm = reader.norm(f"{prefix}.shared_head.norm", eps)
        self._rotary = Rotary(shape.ropes[0], reader.device)

    def attach(self, pool: KVPool) -> None:
        self._pool = pool

    def features(self, hidden_TW: Tensor) -> Tensor:
        return self._model.norm(hidden_TW)

    def keep(self, entries: Entries, before_NE: Tensor) -> None:
        x_NE = self._entry(entries.token_ids_N, before_NE)
        x, slots_N = Residual(x_NE, adds_late=False), streams.upload_indices(entries.slots_N, x_NE.device)
        cos_N1F, sin_N1F = self._angles(entries.positions_N, x_NE)
        if self._latent_layer:
            self._latent_layer.keep(x, self._pool, slots_N, Rotation(cos_N1F, sin_N1F, self._is_interleaved))
        elif self._decoder_layer:
            self._decoder_layer.keep(x, self._pool, slots_N, cos_N1F, sin_N1F)

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor) -> Tensor:
        batch, x_RE = places.batch(place), self._entry(token_ids_R, before_RE)
        angles, x = self._angles(batch.positions, x_RE), Residual(x_RE, adds_late=False)
        if self._latent_layer:
            latent_heads = self._latent_heads(batch, Rotation(*angles, self._is_interleaved))
            self._latent_layer.finish(x, self._latent_layer.store(x, latent_heads), latent_heads)
        elif self._decoder_layer:
            heads = heads_of(self._kernels, batch, self._pool, [angles])
            self._decoder_layer.finish(x, self._decoder_layer.store(x, heads), heads)
        return self._norm(x.total())

    def logits(self, feature_RE: Tensor) -> Tensor:
        return self._model.head(feature_RE)

    def _entry(self, token_ids_T: Tensor, before_TE: Tensor) -> Tensor:
        """Return the layer's input (T, E): embeddings joined with the features before them."""
        embedded_TE = self._embedding_norm(self._model.embed(token_ids_T))
        return self._join(torch.cat((embedded_TE, self._feature_norm(before_TE)), dim=-1))

    def _angles(self, positions_N: Ints, x_NE: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary(streams.upload_indices(positions_N, x_NE.device), x_NE.dtype)

    def _latent_heads(self, batch: Batch, rotation: Rotation) -> LatentHeads:
        pool = self._pool
        if pool.device.type == "cuda":
            return KernelLatentHeads(DeviceBatch.of(batch, pool.device), pool, rotation, scale=self._scale)
        return TorchLatentHeads(batch, pool, rotation, scale=self._scale)


def _expected(shape: ModelConfig, index: int) -> Mapping[str, Shape]:
    prefix, hidden = f"model.layers.{index}", shape.hidden_size
    layer = latent_layer if shape.latent else decoder_layer
    return {
        **{f"{prefix}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")},
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        **layer.expected_tensors(shape, index),
        **decoder_layer.mlp_module(shape, index).expected_tensors(shape, index),
    }
