"""The heads of a step by the CPU kernels: keys and values are written to and read from the pool's blocks in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import AttentionCall, Coding, Kind, PoolView, RotaryCall, Step
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2


class CompiledHeads:
    """See engine.attention.heads.Heads. bf16 only, over a pool of bf16 or of 8 bits.

    What a query gets depends on its own tokens only: not on the queries beside it, nor on how its prompt was cut.
    """

    def __init__(self, kernels: Kernels, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        self._kernels = kernels
        self._pool = pool
        self._rows = StepRows(batch, cos_T1F, sin_T1F)

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        rotation = rotary_call(self._pool, layer, heads_TND, q_norm=q_norm, k_norm=k_norm)
        Program(self._kernels, [rotation]).run(self._rows.step)
        return heads_TND[:, : rotation.q_heads]

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=torch.bfloat16)
        Program(self._kernels, [attention_call(self._pool, layer, q_THD, out_THD, window=window)]).run(self._rows.step)
        return out_THD


class StepRows:
    """A batch as the kernels read it; owns what `step` points to."""

    def __init__(self, batch: Batch, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        self._tables = batch.block_tables  # columns of a wider array, perhaps
        self._arrays = [np.ascontiguousarray(a) for a in (batch.slots, batch.query_lens, batch.context_lens)]
        self._angles = cos_T1F.contiguous(), sin_T1F.contiguous()
        slots, query_lens, context_lens = (array.ctypes.data for array in self._arrays)
        cos, sin = (angle.data_ptr() for angle in self._angles)
        self.step = Step(
            tokens=batch.num_tokens,
            sequences=len(batch.query_lens),
            table_width=self._tables.strides[0] // self._tables.itemsize,
            slots=slots,
            cos=cos,
            sin=sin,
            tables=self._tables.ctypes.data,
            query_lens=query_lens,
            context_lens=context_lens,
        )


def rotary_call(
    pool: KVPool, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None
) -> RotaryCall:
    """Norm and rotate queries and keys in place, and put keys and values into the pool."""
    call = RotaryCall(kind=Kind.ROTATE, pool=_view(pool, layer), heads=heads_TND.data_ptr())
    call.q_heads = heads_TND.shape[1] - 2 * pool.layout.heads_per_rank
    if q_norm is not None and k_norm is not None:
        call.q_norm, call.k_norm, call.eps = q_norm.weight.data_ptr(), k_norm.weight.data_ptr(), q_norm.eps
    return call


def attention_call(pool: KVPool, layer: int, q_THD: Tensor, out_THD: Tensor, *, window: int | None) -> AttentionCall:
    """q_THD may be a part of wider rows; out_THD is contiguous."""
    return AttentionCall(
        kind=Kind.ATTEND,
        pool=_view(pool, layer),
        q=q_THD.data_ptr(),
        q_stride=q_THD.stride(0),
        out=out_THD.data_ptr(),
        q_heads=q_THD.shape[1],
        window=window or 0,
    )


def _view(pool: KVPool, layer: int) -> PoolView:
    layout = pool.layout
    return PoolView(
        codes=pool.codes[layer].data_ptr(),
        scales=pool.scales[layer].data_ptr() if pool.scales else None,
        coding=Coding.of(layout.torch_dtype),
        kv_heads=layout.heads_per_rank,
        block_size=layout.block_size,
        head_dim=layout.head_dim,
    )
