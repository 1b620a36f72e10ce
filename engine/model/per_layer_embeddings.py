"""Embeddings specific to each layer: Gemma 4, after Gemma 3n's per-layer embeddings.

e_l   = (table(token)_l sqrt(P) + norm(projection(x)_l)) / sqrt(2)         x: the token's embedding, once per step
x     = x + norm(up(act(gate(x)) e_l))                                   at the end of layer l
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.kernels.gated_mul import GatedActivation
from engine.layers.layers import Embedding, Linear, RMSNorm, rounded
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.norms import read_norm
from engine.weights.checkpoint import Shape

# T tokens, E hidden_size, L layers, P features of a layer's embedding

_TABLE, _PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"


@dataclass(frozen=True)
class PerLayerEmbeddings:
    """Embeddings of a step's tokens for all layers. Every rank computes all of them."""

    table: Embedding
    projection: Linear
    norm: RMSNorm
    dim: int
    table_scale: float

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig) -> PerLayerEmbeddings:
        width = config.num_layers * config.per_layer_dim
        return cls(
            reader.embedding(_TABLE, config.per_layer_vocab_size),
            reader.linear({_PROJECTION: (0, width)}),
            read_norm(reader, config, _NORM),
            config.per_layer_dim,
            rounded(math.sqrt(config.per_layer_dim), reader.dtype),
        )

    def __call__(self, token_ids_T: Tensor, x_TE: Tensor) -> Tensor:
        """Return the layers' inputs (T, L, P). x: embeddings of the tokens, as the first layer gets them."""
        table_TLP = torch.unflatten(self.table(token_ids_T), -1, (-1, self.dim))
        table_TLP = table_TLP * self.table_scale
        projected_TLP = torch.unflatten(self.projection(x_TE) * x_TE.shape[-1] ** -0.5, -1, (-1, self.dim))
        return (self.norm(projected_TLP) + table_TLP) * 2**-0.5


@dataclass(frozen=True)
class PerLayerInput:
    """One layer's gated addition of its embedding."""

    gate: Linear
    up: Linear
    activation: GatedActivation
    norm: RMSNorm

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> PerLayerInput:
        prefix = f"model.layers.{layer}"
        return cls(
            reader.linear({f"{prefix}.per_layer_input_gate": (0, config.per_layer_dim)}),
            reader.linear({f"{prefix}.per_layer_projection": (0, config.hidden_size)}),
            GatedActivation.of(config.activation),
            read_norm(reader, config, f"{prefix}.post_per_layer_input_norm"),
        )

    def __call__(self, x: Residual, per_layer_TP: Tensor) -> None:
        gated_TP = self.activation(torch.cat((self.gate(x.total()), per_layer_TP), dim=-1))
        x.add(self.norm(self.up(gated_TP)))


def expected_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """Return the tensors of the embeddings and of all layers."""
    dim, hidden = config.per_layer_dim, config.hidden_size
    width = config.num_layers * dim
    tensors: dict[str, Shape] = {
        f"{_TABLE}.weight": (config.per_layer_vocab_size, width),
        f"{_PROJECTION}.weight": (width, hidden),
        f"{_NORM}.weight": (dim,),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.per_layer_input_gate.weight"] = (dim, hidden)
        tensors[f"{prefix}.per_layer_projection.weight"] = (hidden, dim)
        tensors[f"{prefix}.post_per_layer_input_norm.weight"] = (hidden,)
    return tensors
