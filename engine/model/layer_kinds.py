"""Kinds of layers without latents: with attention, recurrent, or with an MLP alone (Nemotron-H)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.model.shape import ModelConfig
from engine.layers.layers import RMSNorm
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model import decoder_layer, latent_layer, recurrent_layer
from engine.model.decoder_layer import DecoderLayer, mlp_module, read_mlp
from engine.model.experts import SparseMLP
from engine.model.experts_beside_mlp import ExpertsBesideMLP
from engine.model.gated_mlp import GatedMLP
from engine.model.norms import read_norm
from engine.model.recurrent_layer import RecurrentLayer
from engine.weights.checkpoint import Shape


@dataclass(frozen=True)
class MLPLayer:
    """Layer x + mlp(norm(x))."""

    index: int
    norm: RMSNorm
    mlp: GatedMLP | SparseMLP | ExpertsBesideMLP

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


def read_layer(reader: ShardReader, config: ModelConfig, index: int) -> DecoderLayer | RecurrentLayer | MLPLayer:
    """Read one layer of a model without latents."""
    if not config.layers[index].has_mixer:
        return MLPLayer.read(reader, config, index)
    if config.layers[index].recurrent:
        return RecurrentLayer.read(reader, config, index)
    return DecoderLayer.read(reader, config, index)


def expected_tensors(config: ModelConfig, index: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer of any model."""
    layer = config.layers[index]
    tensors: dict[str, Shape] = {}
    if layer.recurrent:
        tensors |= recurrent_layer.expected_tensors(config, index)
    elif layer.has_mixer:
        tensors |= (latent_layer if config.latent else decoder_layer).expected_tensors(config, index)
    else:
        tensors[f"model.layers.{index}.input_layernorm.weight"] = (config.hidden_size,)
    if layer.has_mlp:
        tensors |= mlp_module(config, index).expected_tensors(config, index)
    return tensors
