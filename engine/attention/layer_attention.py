"""Description of one layer's attention, shared by all backends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.attention.attention_rule import AttentionRule
from engine.kv.basis import KVBasis
from engine.layers.layers import RMSNorm

# H query heads of this rank, D head_dim, T tokens of the step, F half of the rotated part of a head


@dataclass(frozen=True, kw_only=True)
class LayerAttention(AttentionRule):
    """Attention of one layer on one rank: where its keys and values are, and how they are scored.

    scale: 1 / sqrt(D) in most models.
    """

    # Layer of the pool. Several layers of a model may share its keys and values; the first of them stores them.
    layer: int
    # False: another layer stores the keys and values, and this one computes only queries.
    stores: bool = True
    # Index of the step's angles; see Angles.
    rope: int = 0
    # Norms of each head, before the rotation.
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    v_norm: RMSNorm | None = None
    # Basis of the pool's keys and values; None: the model's own.
    basis: KVBasis | None = None

    def is_plain(self, head_dim: int) -> bool:
        """Return True for softmax(q k / sqrt(D)) v over all keys, as other libraries compute it."""
        rest = (self.window, self.chunk, self.soft_cap, self.sinks_H)
        return all(part is None for part in rest) and math.isclose(self.scale, head_dim**-0.5)


# Cosines and sines (T, 1, F) of a step's tokens, for each kind of rotation in the model. F may be less than D / 2: the
# features [0, 2 F) of a head are rotated, the others are not. F = 0: no rotation.
Angles = list[tuple[Tensor, Tensor]]
