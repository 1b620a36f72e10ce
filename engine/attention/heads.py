"""Attention backends: the part of a layer between its two projections, for one step.

A `Heads` object is made once per step and used by every layer. TorchHeads runs torch in any dtype; CompiledHeads
(cpu_heads.py) the C++ kernels; SharedHeads the C++ kernels and torch; KernelHeads (triton_heads.py) the Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.attention import AttentionPlan, paged_attention
from engine.batch.batch import Batch
from engine.kernels.attention.rotary import rotate
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2

Windows = Iterable[int | None]


class Heads(Protocol):
    """Attention backend of one step."""

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the pool. Returns the queries (T, H, D).

        heads_TND: queries, then keys, then values; may be changed in place.
        """
        ...

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        """Compute softmax(q k / sqrt(D)) v over the keys up to and including each query's own: (T, H, D).

        q_THD: result of `store` for this layer.
        """
        ...


class TorchHeads:
    """Implements Heads with torch operations. Attention gathers the blocks of each step."""

    def __init__(self, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor, windows: Windows) -> None:
        """windows: sliding windows of all layers."""
        self._pool = pool
        self._cos_T1F = cos_T1F
        self._sin_T1F = sin_T1F
        self._slots_T = torch.from_numpy(batch.slots).to(pool.device)
        self._plans = {
            window: AttentionPlan.of(batch, pool, window=window, dtype=cos_T1F.dtype) for window in set(windows)
        }

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        num_kv = self._pool.layout.heads_per_rank
        num_q = heads_TND.shape[1] - 2 * num_kv
        if q_norm is not None and k_norm is not None:
            q_THD, k_TKD, v_TKD = heads_TND.tensor_split((num_q, num_q + num_kv), dim=1)
            q_THD, k_TKD = self._rotate(q_norm(q_THD)), self._rotate(k_norm(k_TKD))
        else:
            qk_TND, v_TKD = heads_TND.tensor_split((num_q + num_kv,), dim=1)
            q_THD, k_TKD = self._rotate(qk_TND).tensor_split((num_q,), dim=1)
        self._pool.write(layer, self._slots_T, k_TKD, v_TKD)
        return q_THD

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        return paged_attention(q_THD, self._pool, layer, self._plans[window])

    def _rotate(self, x_THD: Tensor) -> Tensor:
        return rotate(x_THD, self._cos_T1F, self._sin_T1F)
