"""Attention backends: the part of a layer between its two projections, for one step.

A `Heads` object is made once per step and used by every layer. TorchHeads runs torch in any dtype; CompiledHeads
(cpu_heads.py) the C++ kernels; SharedHeads the C++ kernels and torch; KernelHeads (triton_heads.py) the Triton kernels.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.attention.attention import AttentionPlans, paged_attention
from engine.attention.layer_attention import Angles, LayerAttention
from engine.batch.batch import Batch
from engine.kernels.attention.rotary import rotate
from engine.kv.basis import change_basis
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim


class Heads(Protocol):
    """Attention backend of one step."""

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the pool. Returns the queries (T, H, D).

        heads_TND: queries, then keys, then values unless another layer stores them; may be changed in place.
        """
        ...

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        """Compute attention: (T, H, D). q_THD: result of `store` for this layer."""
        ...


class WindowedHeads:
    """Implements Heads for a pool whose layers with a window have separate block tables; see KVPool.window_of."""

    def __init__(self, layout: KVLayout, whole: Heads, windowed: Heads) -> None:
        """whole: backend of the layers that keep all blocks. windowed: the same, over `Batch.in_windows`."""
        self._heads = [windowed if layout.is_windowed(layer) else whole for layer in range(layout.num_layers)]

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        return self._heads[attention.layer].store(attention, heads_TND)

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        return self._heads[attention.layer].attend(attention, q_THD)


def torch_heads(batch: Batch, pool: KVPool, angles: Angles) -> Heads:
    """Return the backend of torch operations for one step."""
    heads, windowed = TorchHeads(batch, pool, angles), in_windows(batch, pool)
    return WindowedHeads(pool.layout, heads, TorchHeads(windowed, pool, angles)) if windowed else heads


def in_windows(batch: Batch, pool: KVPool) -> Batch | None:
    """Return the batch in layers with a window; None if the pool keeps every block."""
    return None if pool.window_of is None else batch.in_windows(pool.window_of, pool.layout.block_size)


class TorchHeads:
    """Implements Heads with torch operations. Attention gathers the blocks of each step."""

    def __init__(self, batch: Batch, pool: KVPool, angles: Angles) -> None:
        self._pool = pool
        self._angles = angles
        self._slots_T = torch.from_numpy(batch.slots).to(pool.device)
        self._plans = AttentionPlans(batch, pool, dtype=angles[0][0].dtype)

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        num_kv = self._pool.layout.heads[attention.layer].num_heads if attention.stores else 0
        num_q, angles = heads_TND.shape[1] - 2 * num_kv, self._angles[attention.rope]
        qk_TND, v_TKD = heads_TND.tensor_split((num_q + num_kv,), dim=1)
        if attention.q_norm is None and attention.k_norm is None:
            q_THD, k_TKD = rotate(qk_TND, *angles).tensor_split((num_q,), dim=1)
        else:
            q_THD, k_TKD = qk_TND.tensor_split((num_q,), dim=1)
            q_THD, k_TKD = (
                rotate(x_TND if norm is None else norm(x_TND), *angles)
                for x_TND, norm in ((q_THD, attention.q_norm), (k_TKD, attention.k_norm))
            )
        if attention.stores:
            v_TKD = v_TKD if attention.v_norm is None else attention.v_norm(v_TKD)
            if attention.basis is not None:
                q_THD, k_TKD, v_TKD = attention.basis.of_heads(q_THD, k_TKD, v_TKD)
            self._pool.write(attention.layer, self._slots_T, k_TKD, v_TKD)
        elif attention.basis is not None:
            q_THD = change_basis(q_THD, attention.basis.queries)
        return q_THD

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        return paged_attention(q_THD, self._pool, attention, self._plans.of(attention))
