"""The heads of a step by the CPU kernels: keys and values are written to and read from the pool's blocks in place."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch
from engine.cpu.library import Attention, Kernels, Pool, Turn
from engine.kv_pool import KVPool
from engine.layers import RMSNorm

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2


class CompiledHeads:
    """See engine.heads.Heads. bf16 only, over a bf16 or fp8 pool.

    What a query gets depends on its own tokens only: not on the queries beside it, nor on how its prompt was cut.
    """

    def __init__(self, kernels: Kernels, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        self._kernels = kernels
        self._pool = pool
        self._views = [_view(pool, layer) for layer in range(pool.layout.num_layers)]
        # Their memory is what the structs below point to.
        self._arrays = [
            np.ascontiguousarray(a) for a in (batch.slots, batch.block_tables, batch.query_lens, batch.context_lens)
        ]
        self._angles = cos_T1F.contiguous(), sin_T1F.contiguous()
        slots, tables, query_lens, context_lens = (array.ctypes.data for array in self._arrays)
        cos, sin = (angle.data_ptr() for angle in self._angles)
        threads = torch.get_num_threads()
        self._turn = Turn(cos=cos, sin=sin, slots=slots, tokens=batch.num_tokens, threads=threads)
        self._attention = Attention(
            sequences=len(batch.query_lens),
            table_width=batch.block_tables.shape[1],
            tables=tables,
            query_lens=query_lens,
            context_lens=context_lens,
            threads=threads,
        )

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        turn, num_q = self._turn, heads_TND.shape[1] - 2 * self._pool.layout.heads_per_rank
        turn.pool, turn.heads, turn.q_heads = self._views[layer], heads_TND.data_ptr(), num_q
        if q_norm is not None and k_norm is not None:
            turn.q_norm, turn.k_norm, turn.eps = q_norm.weight.data_ptr(), k_norm.weight.data_ptr(), q_norm.eps
        self._kernels.turn_and_store(byref(turn))
        return heads_TND[:, :num_q]

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=torch.bfloat16)
        attention = self._attention
        attention.pool, attention.q, attention.q_stride = self._views[layer], q_THD.data_ptr(), q_THD.stride(0)
        attention.out, attention.q_heads, attention.window = out_THD.data_ptr(), q_THD.shape[1], window or 0
        self._kernels.attend_paged(byref(attention))
        return out_THD


def _view(pool: KVPool, layer: int) -> Pool:
    layout = pool.layout
    return Pool(
        codes=pool.codes[layer].data_ptr(),
        scales=pool.scales[layer].data_ptr() if pool.scales else None,
        kv_heads=layout.heads_per_rank,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
    )
