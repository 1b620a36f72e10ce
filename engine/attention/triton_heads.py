"""The heads of a step on a GPU: see heads.py. Nothing is copied to the device, or back, after the step began."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.batch.device_batch import DeviceBatch
from engine.kernels.decode_attention import decode_attention, splits_for
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.store_heads import HeadNorms, store_heads
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, R rows, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2


class KernelHeads:
    """Implements engine.attention.heads.Heads with the Triton kernels; on a CPU, with their references.

    Rows of one query go to the decode kernel, the others to the prefill kernel; both read the pool's blocks in place.
    What is launched depends on the shapes of the batch's tensors and on `longest`, never on a number in them: so it can
    be recorded, and launched again over other numbers (engine/decode_graphs.py).
    """

    def __init__(self, batch: DeviceBatch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        self._batch = batch
        self._pool = pool
        self._cos_T1F = cos_T1F
        self._sin_T1F = sin_T1F
        if singles := batch.singles:
            num_heads = pool.layout.heads_per_rank
            self._num_splits = splits_for(len(singles.tokens_R), num_heads, singles.longest, pool.device)

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
        return store_heads(
            heads_TND, self._cos_T1F, self._sin_T1F, *self._pool.layer(layer), self._batch.slots_T, norms
        )

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        if singles := self._batch.singles:
            decode_attention(
                q_THD,
                *self._pool.layer(layer),
                tokens_R=singles.tokens_R,
                tables_RB=singles.tables_RB,
                contexts_R=singles.contexts_R,
                window=window,
                num_splits=self._num_splits,
                out_THD=out_THD,
            )
        if prompts := self._batch.prompts:
            prefill_attention(
                q_THD,
                *self._pool.layer(layer),
                tiles=prompts.tiles,
                tables_RB=prompts.tables_RB,
                contexts_R=prompts.contexts_R,
                window=window,
                out_THD=out_THD,
            )
        return out_THD
