"""Decoder layer with a recurrence instead of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.kernels.recurrent.state_slots import StateSlots
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model import delta_net_layer, mamba_layer, short_conv_layer
from engine.model.decoder_layer import read_mlp
from engine.model.delta_net_layer import DeltaNet
from engine.model.experts import SparseMLP
from engine.model.experts_beside_mlp import ExpertsBesideMLP
from engine.model.gated_mlp import GatedMLP
from engine.model.mamba_layer import Mamba
from engine.model.norms import mlp_norms, read_norm
from engine.model.short_conv_layer import ShortConv
from engine.runner import streams
from engine.weights.checkpoint import Shape

# T tokens, R rows


class _Kind(NamedTuple):
    """Kind of mixer: its name in the checkpoint, its class, and its tensors."""

    name: str
    mixer: type[DeltaNet] | type[Mamba] | type[ShortConv]
    expected_tensors: Callable[[Any, str], Mapping[str, Shape]]


_KINDS: Mapping[type[RecurrentShape], _Kind] = {
    DeltaNetShape: _Kind("linear_attn", DeltaNet, delta_net_layer.expected_tensors),
    MambaShape: _Kind("mamba", Mamba, mamba_layer.expected_tensors),
    ShortConvShape: _Kind("conv", ShortConv, short_conv_layer.expected_tensors),
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
    mlp: GatedMLP | SparseMLP | ExpertsBesideMLP | None
    residual_scale: float

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, index: int) -> RecurrentLayer:
        prefix, shape, has_mlp = f"model.layers.{index}", config.layers[index].recurrent, config.layers[index].has_mlp
        assert shape is not None
        kind = _KINDS[type(shape)]
        mixer: Any = kind.mixer
        return cls(
            index=index,
            state_layer=config.state_layer(index),
            input_norm=read_norm(reader, config, f"{prefix}.input_layernorm"),
            mixer=mixer.read(reader, shape, f"{prefix}.{kind.name}"),
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


def expected_tensors(config: ModelConfig, index: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer, without its MLP."""
    prefix, shape = f"model.layers.{index}", config.layers[index].recurrent
    assert shape is not None
    kind = _KINDS[type(shape)]
    norms = ("input_layernorm", mlp_norms(config).before)[: 1 + config.layers[index].has_mlp]
    tensors: dict[str, Shape] = {f"{prefix}.{name}.weight": (config.hidden_size,) for name in norms}
    return {**tensors, **kind.expected_tensors(shape, f"{prefix}.{kind.name}")}
