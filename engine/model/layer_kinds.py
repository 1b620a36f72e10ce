"""Kinds of layers, and the layers without attention: recurrent layers, and MLPs alone (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.kernels.recurrent.state_slots import StateSlots
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model import decoder_layer, experts, latent_layer
from engine.model.decoder_layer import DecoderLayer
from engine.model.experts import MLP, read_mlp
from engine.model.latent_layer import LatentLayer
from engine.model.norms import mlp_norms, read_norm
from engine.model.recurrent_mixers import DeltaNet, Mamba, ShortConv
from engine.runner import streams
from engine.weights.checkpoint import Shape

# T tokens, R rows

# Mixer of each kind of recurrence, and its name in the checkpoint.
_MIXERS: Mapping[type[RecurrentShape], tuple[str, Any]] = {
    DeltaNetShape: ("linear_attn", DeltaNet),
    MambaShape: ("mamba", Mamba),
    ShortConvShape: ("conv", ShortConv),
}


@dataclass(frozen=True)
class StepStates:
    """Pool, and the slots that one step reads and writes."""

    pool: KVPool
    slots: StateSlots

    @classmethod
    def of(cls, batch: Batch, pool: KVPool) -> StepStates | None:
        """Start one copy to the device, without waiting for it. Returns None for a model without recurrent layers."""
        if not pool.states:
            return None
        num_rows = len(batch.query_lens)
        # Arrays start at multiples of 16 bytes: see engine.batch.device_batch.
        first_read = num_rows + 1 + (num_rows + 1) % 2
        first_write = first_read + num_rows + num_rows % 2
        parts = slice(num_rows + 1), slice(first_read, first_read + num_rows), slice(first_write, None)
        numbers = np.full(first_write + batch.num_tokens, -1)
        starts, read, write = (numbers[part] for part in parts)
        starts[0] = 0
        np.cumsum(batch.query_lens, out=starts[1:])
        read[:] = np.where(batch.context_lens == batch.query_lens, -1, batch.state_indices)
        write[starts[1:] - 1] = batch.state_indices
        write[batch.state_writes[:, 0]] = batch.state_writes[:, 1]
        on_device = streams.upload_indices(numbers, pool.device)
        starts_S1, read_S, write_T = (on_device[part] for part in parts)
        return cls(pool, StateSlots(starts_S1, read_S, write_T, max_query_len=int(batch.query_lens.max())))


@dataclass(frozen=True)
class RecurrentLayer:
    """Layer x + mixer(norm(x)), then x + mlp(norm(x)) if it has an MLP."""

    index: int
    # Index in `pool.states`.
    state_layer: int
    input_norm: RMSNorm
    mixer: DeltaNet | Mamba | ShortConv
    mlp_norm: RMSNorm | None
    mlp: MLP | None
    residual_scale: float

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, index: int) -> RecurrentLayer:
        prefix, shape, has_mlp = f"model.layers.{index}", config.layers[index].recurrent, config.layers[index].has_mlp
        assert shape is not None
        name, mixer = _MIXERS[type(shape)]
        return cls(
            index=index,
            state_layer=config.state_layer(index),
            input_norm=read_norm(reader, config, f"{prefix}.input_layernorm"),
            mixer=mixer.read(reader, shape, f"{prefix}.{name}"),
            mlp_norm=read_norm(reader, config, f"{prefix}.{mlp_norms(config).before}") if has_mlp else None,
            mlp=read_mlp(reader, config, index) if has_mlp else None,
            residual_scale=config.residual_scale,
        )

    def __call__(self, x: Residual, states: StepStates) -> None:
        tensors = states.pool.states[self.state_layer].tensors
        self.mixer(x, tensors, states.slots, norm=self.input_norm, scale=self.residual_scale)
        if self.mlp is not None:
            self.mlp(x, norm=self.mlp_norm)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return self.mixer.is_fixed and (self.mlp is None or self.mlp.is_fixed)


@dataclass(frozen=True)
class MLPLayer:
    """Layer x + mlp(norm(x))."""

    index: int
    norm: RMSNorm
    mlp: MLP

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, index: int) -> MLPLayer:
        norm = read_norm(reader, config, f"model.layers.{index}.input_layernorm")
        return cls(index, norm, read_mlp(reader, config, index))

    def __call__(self, x: Residual) -> None:
        self.mlp(x, norm=self.norm)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return self.mlp.is_fixed


Layer = DecoderLayer | LatentLayer | RecurrentLayer | MLPLayer


def read_layer(reader: ShardReader, config: ModelConfig, index: int) -> Layer:
    layer = config.layers[index]
    if not layer.has_mixer:
        return MLPLayer.read(reader, config, index)
    if layer.recurrent:
        return RecurrentLayer.read(reader, config, index)
    return (LatentLayer if config.latent else DecoderLayer).read(reader, config, index)


def expected_tensors(config: ModelConfig, index: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer."""
    layer, prefix, hidden = config.layers[index], f"model.layers.{index}", config.hidden_size
    tensors: dict[str, Shape] = {}
    if layer.recurrent:
        name, mixer = _MIXERS[type(layer.recurrent)]
        norms = ("input_layernorm", mlp_norms(config).before)[: 1 + layer.has_mlp]
        tensors |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
        tensors |= mixer.expected_tensors(layer.recurrent, f"{prefix}.{name}")
    elif layer.has_mixer:
        tensors |= (latent_layer if config.latent else decoder_layer).expected_tensors(config, index)
    else:
        tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
    return {**tensors, **(experts.expected_tensors(config, index) if layer.has_mlp else {})}
