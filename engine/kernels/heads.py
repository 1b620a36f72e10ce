"""The heads of a step on a GPU: see engine/heads.py. Nothing is copied to the device, or back, after the step began."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch import Batch, Ints
from engine.kernels.decode_attention import decode_attention, splits_for
from engine.kernels.kv_write import write_kv
from engine.kernels.prefill_attention import QueryTiles, prefill_attention
from engine.kernels.rotary import rotate
from engine.kv_pool import KVPool
from engine.layers import RMSNorm

# T tokens, R rows, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2


class KernelHeads:
    """Implements engine.heads.Heads with the kernels of this folder; on a CPU, with their references.

    Rows of one query go to the decode kernel, the others to the prefill kernel; both read the pool's blocks in place.
    """

    def __init__(self, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        self._pool = pool
        self._cos_T1F = cos_T1F
        self._sin_T1F = sin_T1F
        self._slots_T = self._place(batch.slots)
        begins_R = np.cumsum(batch.query_lens) - batch.query_lens
        is_single_R = batch.query_lens == 1
        self._singles = _Singles(pool, batch, np.flatnonzero(is_single_R), begins_R)
        self._prompts = _Prompts(pool, batch, np.flatnonzero(~is_single_R), begins_R)

    def store(self, layer: int, heads_TND: Tensor, *, q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> Tensor:
        pool, num_kv = self._pool, self._pool.layout.heads_per_rank
        q_THD, k_TKD, v_TKD = heads_TND.split((heads_TND.shape[1] - 2 * num_kv, num_kv, num_kv), dim=1)
        if q_norm is not None and k_norm is not None:
            q_THD, k_TKD = q_norm(q_THD), k_norm(k_TKD)
        k_TKD, scales = rotate(k_TKD, self._cos_T1F, self._sin_T1F), pool.scales[layer] if pool.scales else None
        write_kv(pool.codes[layer], scales, self._slots_T, k_TKD, v_TKD)
        return rotate(q_THD, self._cos_T1F, self._sin_T1F)

    def attend(self, layer: int, q_THD: Tensor, *, window: int | None) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        self._singles.attend(layer, q_THD, window, out_THD)
        self._prompts.attend(layer, q_THD, window, out_THD)
        return out_THD

    def _place(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self._pool.device)


class _Singles:
    """The rows of one query each."""

    def __init__(self, pool: KVPool, batch: Batch, rows: Ints, begins_R: Ints) -> None:
        self._pool = pool
        self._num_rows = len(rows)
        if not len(rows):
            return
        self._tokens_R = torch.from_numpy(begins_R[rows]).to(pool.device)
        self._tables_RB, self._contexts_R = tables_of(pool, batch, rows)
        longest, num_heads = int(batch.context_lens[rows].max()), pool.layout.heads_per_rank
        self._num_splits = splits_for(len(rows), num_heads, longest, pool.device) if pool.device.type == "cuda" else 1

    def attend(self, layer: int, q_THD: Tensor, window: int | None, out_THD: Tensor) -> None:
        if self._num_rows:
            decode_attention(
                q_THD,
                self._pool.codes[layer],
                self._pool.scales[layer] if self._pool.scales else None,
                tokens_R=self._tokens_R,
                tables_RB=self._tables_RB,
                contexts_R=self._contexts_R,
                window=window,
                num_splits=self._num_splits,
                out_THD=out_THD,
            )


class _Prompts:
    """The rows of several queries."""

    def __init__(self, pool: KVPool, batch: Batch, rows: Ints, begins_R: Ints) -> None:
        self._pool = pool
        self._num_rows = len(rows)
        if not len(rows):
            return
        self._tables_RB, self._contexts_R = tables_of(pool, batch, rows)
        self._tiles = QueryTiles.of(begins_R[rows], batch.query_lens[rows], batch.context_lens[rows], pool.device)

    def attend(self, layer: int, q_THD: Tensor, window: int | None, out_THD: Tensor) -> None:
        if self._num_rows:
            prefill_attention(
                q_THD,
                self._pool.codes[layer],
                self._pool.scales[layer] if self._pool.scales else None,
                tiles=self._tiles,
                tables_RB=self._tables_RB,
                contexts_R=self._contexts_R,
                window=window,
                out_THD=out_THD,
            )


def tables_of(pool: KVPool, batch: Batch, rows: Ints) -> tuple[Tensor, Tensor]:
    """The block tables (R, B) and contexts (R,) of some rows, int32 on the pool's device."""
    numbers = (batch.block_tables[rows], batch.context_lens[rows])
    tables_RB, contexts_R = (torch.from_numpy(n.astype(np.int32)).to(pool.device) for n in numbers)
    return tables_RB, contexts_R
