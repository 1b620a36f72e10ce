"""Forward pass of one rank's share of a model: embedding, layers, final norm and output head.

One class computes all families. ModelConfig selects the parts: layers (layer_kinds.py), MLPs (gated_mlp.py, experts.py)
and per_layer_embeddings.py.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.attention.cpu_heads import CompiledHeads, SharedHeads, StepRows, num_long_rows, quickest_way
from engine.attention.flashinfer_heads import FlashInfer, find_flashinfer, is_possible
from engine.attention.heads import Heads, in_windows, torch_heads
from engine.attention.latent_heads import Rotation, TorchLatentHeads
from engine.attention.layer_attention import Angles
from engine.attention.rotary import Rotary
from engine.attention.triton_heads import kernel_heads
from engine.attention.triton_latent_heads import KernelLatentHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.cpu.autotune import KERNELS, TILES, TORCH
from engine.kernels.attention.queries import most_queries
from engine.kv.basis import StoredBases
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, is_plain, rounded
from engine.layers.packed_matrix import PackedMatrix
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model import layer_kinds, per_layer_embeddings
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.cpu_program import CompiledHead, CompiledLayers, can_compile
from engine.model.decoder_layer import DecoderLayer
from engine.model.layer_kinds import Layer, MLPLayer, RecurrentLayer, StepStates
from engine.model.norms import read_norm
from engine.model.per_layer_embeddings import PerLayerEmbeddings
from engine.weights.checkpoint import Shape, check_tensors

logger = logging.getLogger(__name__)

# T tokens of the step, R rows with logits, E hidden_size, H query heads of this rank, D head_dim, F half of its rotated
# part, V vocabulary, S scored positions, N of them per slice

# Smallest step for FlashInfer: its planning on the host takes as long as launching the step.
MIN_TOKENS = 64
# Logits per slice; those of a long chunk would not fit beside the pool.
SLICE_BYTES = 32 << 20
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_ROWS_COMPARED = 8192

OnLayer = Callable[[int], None]
OnLogits = Callable[[Tensor], None]


class Transformer:
    """One rank's share of a model, with the forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        reader: ShardReader,
        layout: KVLayout,
        *,
        on_read: OnLayer,
        bases: StoredBases | None = None,
    ) -> None:
        """Read the weights and call `on_read` after each layer. Raises SpecError if tensors do not match the config.

        bases: of the pool's keys and values; None: the model's own.
        """
        embedding, head, warning = _embedding_and_head(config, reader)
        expected = expected_tensors(config, (embedding, head))
        check_tensors(reader.checkpoint, expected, optional=_optional_tensors(config, reader.checkpoint.shapes))
        if warning:
            logger.warning(warning)
        self._config = config
        self._parallel = reader.parallel
        self._kernels = reader.kernels
        self._embedding = reader.embedding(embedding, config.vocab_size)
        self._embedding_scale = rounded(config.embedding_scale, reader.dtype)
        self._layers: list[Layer] = []
        for index in range(config.num_layers):
            layer = layer_kinds.read_layer(reader, config, index)
            self._layers.append(_with_basis(layer, bases, reader) if isinstance(layer, DecoderLayer) else layer)
            on_read(index)
        self._norm = read_norm(reader, config, "model.norm")
        if head == embedding:
            self._embedding, head_matrix = reader.tied(self._embedding)
            self._head = Linear(head_matrix)
        else:
            self._head = reader.linear({head: reader.parallel.span(config.vocab_size)})
        self._head_dtype = reader.dtype
        self._layer_embeddings = PerLayerEmbeddings.read(reader, config) if config.per_layer_dim else None
        self._rotaries = [Rotary(rope, reader.device) for rope in config.ropes]
        self._has_unrotated = any(layer.rope is None for layer in config.layers)
        self._compiled: CompiledLayers | None = None
        self._compiled_head: CompiledHead | None = None
        if reader.kernels and reader.parallel.size == 1 and isinstance(self._head.matrix, PackedMatrix):
            self._compiled_head = CompiledHead(reader.kernels, self._head, self._norm)
        q_first, q_end = reader.parallel.span(config.num_q_heads)
        # Queries per group; see engine/kernels/attention/queries.py. Latent attention fills a tile with one query.
        fewest_kv_heads = min(heads.num_heads for heads in layout.heads)
        self.most_queries = 1 if config.latent else most_queries(q_end - q_first, fewest_kv_heads)
        self._flashinfer: FlashInfer | None = None
        # Backend for long rows.
        self._way = KERNELS
        if reader.kernels and reader.measured and not config.latent:
            self._way = quickest_way(reader.kernels, layout, q_end - q_first, reader.measured)

    def __call__(
        self,
        batch: Batch,
        pool: KVPool,
        on_layer: OnLayer | None,
        on_logits: OnLogits | None = None,
        aux_hidden_states: AuxHiddenStates | None = None,
        others: Callable[[Any], Any] | None = None,
    ) -> Tensor:
        """Compute a step and write its KV to the pool. others: replaces the attention backend, on a CPU.

        `on_layer` is called after each layer's KV is written. `on_logits` is called with the logits (N, V) of scored
        positions, slice by slice. `aux_hidden_states` collects hidden states.
        Returns the logits (R, V) in fp32, on every rank.
        """
        device = pool.device
        if device.type == "cuda":
            on_device = DeviceBatch.of(batch, device, most_queries=self.most_queries, windowed=in_windows(batch, pool))
            prompts = self._flashinfer if on_device.prompts and batch.num_tokens >= MIN_TOKENS else None
            return self.compute(
                on_device,
                pool,
                on_layer,
                on_logits,
                aux_hidden_states,
                partial(prompts.heads, batch) if prompts else None,
                StepStates.of(batch, pool),
            )
        token_ids_T, positions_T = (torch.from_numpy(ids).to(device) for ids in (batch.token_ids, batch.positions))
        inputs, states = self._inputs(token_ids_T, positions_T, aux_hidden_states), StepStates.of(batch, pool)
        is_scored = len(batch.scored_rows) > 0
        if others is None and (compiled := self._compiled_for(batch, pool)) is not None:
            step_rows = StepRows(batch, inputs.angles, states.slots if states else None, in_windows(batch, pool))
            x_TE = compiled(inputs.x_TE, step_rows, on_layer, aux_hidden_states, is_whole=is_scored)
            if not is_scored:
                return self.logits(x_TE, num_drafted=batch.num_drafted)
        else:
            heads = self._heads_on_cpu(batch, pool, inputs.angles)
            heads = others(heads) if others else heads
            x = Residual(inputs.x_TE, adds_late=False)
            x_TE = self._pass(x, inputs, heads, on_layer, aux_hidden_states, states)
        if is_scored:
            self._score(x_TE[torch.from_numpy(batch.scored_rows).to(device)], on_logits)
        if not batch.wants_all_logits:
            x_TE = x_TE[torch.from_numpy(batch.logits_rows).to(device)]
        return self.logits(x_TE, num_drafted=batch.num_drafted)

    def compute(
        self,
        batch: DeviceBatch,
        pool: KVPool,
        on_layer: OnLayer | None = None,
        on_logits: OnLogits | None = None,
        aux_hidden_states: AuxHiddenStates | None = None,
        others: Callable[[Heads], Heads] | None = None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute a step whose batch is on the device, with the GPU kernels.

        others: replaces the attention backend. states: None if the model has no recurrent layers. If `hindrance` is
        None, nothing here waits for the device or depends on values there.
        """
        inputs = self._inputs(batch.token_ids_T, batch.positions_T, aux_hidden_states)
        heads: Heads | KernelLatentHeads
        if self._config.latent:
            scale = self._config.attention_scale(0)
            heads = KernelLatentHeads(batch, pool, self._rotation(inputs.angles), scale=scale)
        else:
            heads = kernel_heads(batch, pool, inputs.angles)
            heads = others(heads) if others else heads
        x = Residual(inputs.x_TE, adds_late=True)
        x_TE = self._pass(x, inputs, heads, on_layer, aux_hidden_states, states)
        if batch.scored_rows is not None:
            self._score(x_TE.index_select(0, batch.scored_rows), on_logits)
        return self.logits(x_TE if batch.logits_rows is None else x_TE.index_select(0, batch.logits_rows))

    def choose_prompt_heads(self, pool: KVPool) -> None:
        """Choose the fastest prompt-attention backend for this pool, on a GPU."""
        config = self._config
        if not is_possible(pool, dtype=self._head_dtype) or not any(
            isinstance(layer, DecoderLayer) and layer.attention.is_plain(layer.head_dim) for layer in self._layers
        ):
            return
        first, end = self._parallel.span(config.num_q_heads)
        self._flashinfer = find_flashinfer(pool, num_q_heads=end - first, dtype=self._head_dtype)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings (T, E)."""
        x_TE = self._embedding(token_ids_T)
        return x_TE if self._embedding_scale == 1 else x_TE * self._embedding_scale

    def normed(self, x_RE: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output: (R, E)."""
        return self._norm(x_RE)

    def logits(self, x_RE: Tensor, *, num_drafted: int = 0) -> Tensor:
        """Compute logits from the last layer's output before the norm: (R, V) in fp32, on every rank.

        num_drafted: number of rows that are draft tokens.
        """
        if self._compiled_head and self._compiled_head.is_quickest(len(x_RE)):
            return self._capped(self._compiled_head(x_RE.contiguous(), num_drafted))
        return self._capped(self._parallel.all_gather(self._head(x_RE, before=self._norm), self._config.vocab_size))

    def head(self, x_RE: Tensor) -> Tensor:
        """Compute logits from normed states: (R, V) in fp32, on every rank."""
        return self._capped(self._parallel.all_gather(self._head(x_RE), self._config.vocab_size))

    def without(self, layers: Collection[int]) -> Transformer:
        """Return a model that shares the weights but skips some layers, whose KV is neither read nor written."""
        part = copy(self)
        part._layers = [layer for layer in self._layers if layer.index not in layers]
        part._compiled = None
        return part

    @property
    def hindrance(self) -> str | None:
        """Reason that `compute` cannot be captured in a CUDA graph; None if it can.

        All ranks of a gang capture the same steps in the same order, including the NCCL kernels.
        """
        if not is_plain(self._head) or not all(layer.is_fixed for layer in self._layers):
            return "experts are computed one by one or spread over ranks"
        return None

    def _capped(self, logits_RV: Tensor) -> Tensor:
        """Return the logits in fp32, scaled and capped."""
        logits_RV, cap = logits_RV.float(), self._config.logits_soft_cap
        if self._config.logits_scale != 1:
            logits_RV = logits_RV * self._config.logits_scale
        return logits_RV if cap is None else torch.tanh(logits_RV / cap) * cap

    def _angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Angles, Tensor | None]:
        """Return the angles of each rotation, then empty ones for unrotated layers, and the factors of queries.

        The factors are (T, 1, 1), or None if the model has none.
        """
        angles = [rotary(positions_T, dtype) for rotary in self._rotaries]
        if self._has_unrotated:
            angles.append((angles[0][0][..., :0],) * 2)
        if (scaling := self._config.query_scaling) is None:
            return angles, None
        steps_T = torch.floor((positions_T.float() + scaling.offset) / scaling.interval)
        return angles, (1 + scaling.scale * torch.log1p(steps_T)).to(dtype).view(-1, 1, 1)

    def _rotation(self, angles: Angles) -> Rotation:
        return Rotation(*angles[0], self._config.ropes[0].is_interleaved)

    def _score(self, scored_SE: Tensor, on_logits: OnLogits | None) -> None:
        """Compute scored positions in slices. on_logits: None on ranks that only contribute their vocabulary share."""
        num_rows = max(1, SLICE_BYTES // (4 * self._config.vocab_size))
        for scored_NE in torch.split(scored_SE, num_rows):
            logits_NV = self.logits(scored_NE)
            if on_logits is not None:
                on_logits(logits_NV)

    def _compiled_for(self, batch: Batch, pool: KVPool) -> CompiledLayers | None:
        """Return the compiled layers; None if a step needs more than CPU kernels, or torch is faster."""
        if self._kernels is None or (self._way == TORCH and num_long_rows(batch)):
            return None
        if self._compiled is None and self._parallel.size == 1 and self._layer_embeddings is None:
            if can_compile(self._layers):
                self._compiled = CompiledLayers(self._kernels, self._layers, pool, by_tiles=self._way == TILES)
        return self._compiled if self._compiled and self._compiled.is_quickest(batch.num_tokens) else None

    def _heads_on_cpu(self, batch: Batch, pool: KVPool, angles: Angles) -> Heads | TorchLatentHeads:
        if self._config.latent:
            return TorchLatentHeads(batch, pool, self._rotation(angles), scale=self._config.attention_scale(0))
        if self._kernels is None:
            return torch_heads(batch, pool, angles)
        if self._way == TORCH and num_long_rows(batch):
            return SharedHeads(self._kernels, batch, pool, angles)
        return CompiledHeads(self._kernels, batch, pool, angles, by_tiles=self._way == TILES)

    def _inputs(self, token_ids_T: Tensor, positions_T: Tensor, aux_hidden_states: AuxHiddenStates | None) -> _Inputs:
        x_TE = self.embed(token_ids_T)
        if aux_hidden_states is not None:
            aux_hidden_states.token_ids_T = token_ids_T
        per_layer_TLP = None if self._layer_embeddings is None else self._layer_embeddings(token_ids_T, x_TE)
        return _Inputs(x_TE, per_layer_TLP, *self._angles(positions_T, x_TE.dtype))

    def _pass(
        self,
        x: Residual,
        inputs: _Inputs,
        heads: Any,
        on_layer: OnLayer | None,
        aux_hidden_states: AuxHiddenStates | None,
        states: StepStates | None,
    ) -> Tensor:
        """Run all layers: (T, E). heads: backend of the layers' kind of attention."""
        for layer in self._layers:
            if aux_hidden_states is not None and aux_hidden_states.wants(layer.index):
                aux_hidden_states.note(layer.index, x.total())
            if isinstance(layer, RecurrentLayer):
                assert states is not None, "the pool has no states"
                layer(x, states)
                continue
            if isinstance(layer, MLPLayer):
                layer(x)
                continue
            q_THD = layer.store(x, heads)
            if layer.scales_queries and inputs.query_factors_T11 is not None:
                q_THD = q_THD * inputs.query_factors_T11
            if on_layer is not None and layer.written is not None:
                on_layer(layer.written)
            layer.finish(x, q_THD, heads)
            if isinstance(layer, DecoderLayer):
                layer.end(x, None if inputs.per_layer_TLP is None else inputs.per_layer_TLP[:, layer.index])
        if aux_hidden_states is not None:
            aux_hidden_states.note(len(self._layers), x.total())
        return x.total()


class _Inputs(NamedTuple):
    """Inputs of the layers of one step."""

    x_TE: Tensor  # embeddings
    per_layer_TLP: Tensor | None  # embeddings of each layer
    angles: Angles
    query_factors_T11: Tensor | None  # of the layers that scale queries


def expected_tensors(config: ModelConfig, ends: tuple[str, str] | None = None) -> Mapping[str, Shape]:
    """Return the name and shape of every tensor of the checkpoint.

    ends: names of the token embedding and the output matrix; None: as config.json says.
    """
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {}
    for index in range(config.num_layers):
        tensors |= layer_kinds.expected_tensors(config, index)
    for name in ends or (_EMBEDDING, _EMBEDDING if config.tie_embeddings else _HEAD):
        tensors[f"{name}.weight"] = (config.vocab_size, hidden)
    if config.per_layer_dim:
        tensors |= per_layer_embeddings.expected_tensors(config)
    return tensors | {"model.norm.weight": (hidden,)}


def _with_basis(layer: DecoderLayer, bases: StoredBases | None, reader: ShardReader) -> DecoderLayer:
    if bases is None:
        return layer
    basis = bases.of(layer.attention.layer, rank=reader.parallel.rank, device=reader.device)
    return replace(layer, attention=replace(layer.attention, basis=basis))


def _embedding_and_head(config: ModelConfig, reader: ShardReader) -> tuple[str, str, str]:
    """Return the names of the token embedding and of the output matrix, the same one if they are tied, and a warning.

    The tensors take precedence over tie_word_embeddings: a head that differs from the embedding is used, and a missing
    head is tied, each with a warning.
    """
    found = reader.checkpoint.shapes
    if f"{_HEAD}.weight" not in found:
        if config.tie_embeddings:
            return _EMBEDDING, _EMBEDDING, ""
        # A head that is left out of the index, or under a prefix that this model does not read, is reported as missing.
        if any(name.endswith(f"{_HEAD}.weight") for name in (*found, *reader.checkpoint.unindexed)):
            return _EMBEDDING, _HEAD, ""
        return (
            _EMBEDDING,
            _EMBEDDING,
            f"no {_HEAD}.weight, and tie_word_embeddings is not true: the token embedding is used as the head, where "
            "transformers would use random numbers; set tie_word_embeddings: true in config.json",
        )
    if not config.tie_embeddings:
        return _EMBEDDING, _HEAD, ""
    if f"{_EMBEDDING}.weight" not in found:
        return _HEAD, _HEAD, ""
    if _is_same(reader, config.vocab_size):
        return _EMBEDDING, _EMBEDDING, ""
    return (
        _EMBEDDING,
        _HEAD,
        f"{_HEAD}.weight differs from the token embedding although tie_word_embeddings is true: the head is used as "
        "stored; set tie_word_embeddings: false in config.json",
    )


def _is_same(reader: ShardReader, vocab_size: int) -> bool:
    """Return True if this rank's rows of embedding and head are equal, as the model would use them."""
    first, end = reader.parallel.span(vocab_size)
    checkpoint, names = reader.checkpoint, (f"{_EMBEDDING}.weight", f"{_HEAD}.weight")
    if checkpoint.shapes[names[0]] != checkpoint.shapes[names[1]] or checkpoint.shapes[names[0]][0] < end:
        return False
    for start in range(first, end, _ROWS_COMPARED):
        rows = start, min(start + _ROWS_COMPARED, end)
        embedding, head = (checkpoint.read(name, rows=rows).to(reader.dtype) for name in names)
        if not torch.equal(embedding, head):
            return False
    return True


def _optional_tensors(config: ModelConfig, found: Iterable[str]) -> frozenset[str]:
    """Return tensors that may exist but are not read.

    These are a tied head, multi-token-prediction layers past the last, and indexers of layers that share positions.
    """
    layer_of = {name: int(match[1]) for name in found if (match := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    first = min((layer for name, layer in layer_of.items() if name.endswith(".eh_proj.weight")), default=math.inf)
    optional = {name for name, layer in layer_of.items() if layer >= max(first, config.num_layers)}
    if config.latent and config.latent.index:
        shared = {i for i, layer in enumerate(config.layers) if not layer.has_indexer}
        optional |= {name for name, layer in layer_of.items() if layer in shared and ".self_attn.indexer." in name}
    return frozenset(optional | {f"{_HEAD}.weight"})
