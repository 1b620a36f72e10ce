"""Indexer of a layer with sparse attention; see engine/attention/chosen_positions.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import IndexConfig, ModelConfig
from engine.attention.chosen_positions import IndexedTokens
from engine.layers.layers import Linear
from engine.layers.shards import ShardReader
from engine.weights.checkpoint import Shape

# T tokens, E hidden_size, O numbers of a short query, G index heads, I numbers of an index key

_EPS = 1e-6


@dataclass(frozen=True)
class Indexer:
    """Index queries, keys and weights of a step's tokens. Every rank computes all heads, so that all choose alike."""

    index: IndexConfig
    query: Linear
    key: Linear
    norm_I: Tensor
    bias_I: Tensor
    # fp32, with the factors of heads and products.
    weight_GE: Tensor

    @classmethod
    def read(cls, reader: ShardReader, index: IndexConfig, prefix: str) -> Indexer:
        scale = (index.num_heads * index.head_dim) ** -0.5
        return cls(
            index=index,
            query=reader.linear({f"{prefix}.wq_b": (0, index.num_heads * index.head_dim)}),
            key=reader.linear({f"{prefix}.wk": (0, index.head_dim)}),
            norm_I=reader.tensor(f"{prefix}.k_norm.weight"),
            bias_I=reader.tensor(f"{prefix}.k_norm.bias"),
            weight_GE=reader.tensor(f"{prefix}.weights_proj.weight").float() * scale,
        )

    def __call__(self, x_TE: Tensor, q_TO: Tensor) -> IndexedTokens:
        """Return the outputs before rotation. x: normed input of the layer; q: normed short queries."""
        return IndexedTokens(
            index=self.index,
            q_TGI=torch.unflatten(self.query(q_TO), -1, (self.index.num_heads, self.index.head_dim)),
            key_TI=self.keys(x_TE),
            weights_TG=F.linear(x_TE.float(), self.weight_GE),
        )

    def keys(self, x_TE: Tensor) -> Tensor:
        """Return the keys (T, I) before rotation. x: normed input of the layer."""
        return F.layer_norm(self.key(x_TE), (self.index.head_dim,), self.norm_I, self.bias_I, _EPS)


def expected_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """Return the tensors of one indexer, relative to the layer's attention."""
    assert config.latent is not None and config.latent.index is not None and config.latent.query_dim is not None
    index, hidden = config.latent.index, config.hidden_size
    return {
        "indexer.wq_b.weight": (index.num_heads * index.head_dim, config.latent.query_dim),
        "indexer.wk.weight": (index.head_dim, hidden),
        "indexer.k_norm.weight": (index.head_dim,),
        "indexer.k_norm.bias": (index.head_dim,),
        "indexer.weights_proj.weight": (index.num_heads, hidden),
    }
