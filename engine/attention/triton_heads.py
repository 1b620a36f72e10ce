"""Attention of a step on a GPU; see heads.py. Copies nothing between host and device after the step has started."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.heads import Heads, WindowedHeads
from engine.attention.layer_attention import Angles, LayerAttention
from engine.batch.device_batch import DeviceBatch, PromptRows, upload
from engine.kernels.attention.decode_attention import launch_decode_attention, resident_programs
from engine.kernels.attention.dense_prefill import launch_dense_prefill_attention
from engine.kernels.attention.gather_rows import launch_gather_rows
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.prefill_attention import launch_prefill_attention
from engine.kernels.attention.queries import QueryGroups
from engine.kernels.attention.rotary import rotate
from engine.kernels.attention.store_heads import HeadNorms, launch_store_heads
from engine.kernels.language import cdiv
from engine.kv.basis import KVBasis, change_basis
from engine.kv.pool import KVPool

# T tokens, R rows, H query heads and K kv heads of this rank, N = H + 2 K, D head_dim, F = D / 2, L keys of all
# prompts, N gathered blocks

# Average queries per key from which gathering keys costs less than reading blocks in place. Of the device's matrix
# rate, gathering reaches .63, reading in place .50, or about .25 over 8 bits (docs/benchmarks/gpu.md).
MIN_QUERIES, MIN_QUERIES_OF_CODES = 256, 64
# Per layer, beside the pool; above this, blocks are read in place.
MOST_GATHERED_BYTES = 1 << 28
# The dense kernel has no tiles for wider heads.
MOST_GATHERED_DIM = 256


class KernelHeads:
    """Implements engine.attention.heads.Heads with the Triton kernels.

    Rows with few queries use the decode kernel, other rows the prefill kernel. Both read the pool's blocks in place,
    except that keys seen by many queries are gathered first.
    The launches for rows with few queries depend only on tensor shapes and `longest`, never on values. They can
    therefore be captured in a CUDA graph and replayed with other values (engine/runner/decode_graphs.py).
    """

    def __init__(self, batch: DeviceBatch, pool: KVPool, angles: Angles, *, gathers: bool = True) -> None:
        """gathers: False if every layer has a window: keys are then never gathered."""
        self._batch = batch
        self._pool = pool
        self._angles = angles
        # By window, chunk and number of KV heads.
        self._splits: dict[tuple[int | None, int | None, int], Splits] = {}
        self._gathered: GatheredRows | None = None
        if batch.prompts and gathers and is_worth_gathering(batch.prompts, pool, angles[0][0].dtype):
            self._gathered = GatheredRows.of(batch.prompts, pool)

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        angles, q_norm = self._angles[attention.rope], attention.q_norm
        if not attention.stores:
            q_THD = rotate(heads_TND if q_norm is None else q_norm(heads_TND), *angles)
            return q_THD if attention.basis is None else change_basis(q_THD, attention.basis.queries)
        norms = (q_norm, attention.k_norm, attention.v_norm)
        q_D, k_D, v_D = (None if norm is None else norm.weight for norm in norms)
        if attention.basis is not None:
            return self._store_in_basis(attention, attention.basis, heads_TND)
        # A layer's norms share their epsilon.
        eps = next((norm.eps for norm in norms if norm is not None), 0.0)
        return launch_store_heads(
            heads_TND,
            *angles,
            *self._pool.layer(attention.layer),
            self._batch.slots_T,
            HeadNorms(q_D, k_D, v_D, eps),
        )

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        out_THD = torch.empty_like(q_THD)
        if query_groups := self._batch.query_groups:
            launch_decode_attention(
                q_THD,
                *self._pool.layer(attention.layer),
                query_groups=query_groups,
                rule=attention,
                splits=self._splits_of(attention, query_groups),
                out_THD=out_THD,
            )
        sees_all = attention.window is None and attention.chunk is None
        if self._gathered and sees_all and q_THD.shape[-1] <= MOST_GATHERED_DIM:
            self._attend_gathered(attention, q_THD, self._gathered, out_THD)
        elif prompts := self._batch.prompts:
            launch_prefill_attention(
                q_THD,
                *self._pool.layer(attention.layer),
                tiles=prompts.tiles,
                tables_RB=prompts.tables_RB,
                contexts_R=prompts.contexts_R,
                rule=attention,
                out_THD=out_THD,
            )
        return out_THD if attention.basis is None else change_basis(out_THD, attention.basis.outputs)

    def _store_in_basis(self, attention: LayerAttention, basis: KVBasis, heads_TND: Tensor) -> Tensor:
        """Do the same as launch_store_heads, in separate steps: fusing whole matrix products per token does not pay."""
        num_kv, angles = len(basis.keys), self._angles[attention.rope]
        parts = torch.split(heads_TND, [heads_TND.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
        norms = (attention.q_norm, attention.k_norm, attention.v_norm)
        q_THD, k_TKD, v_TKD = (x if norm is None else norm(x) for x, norm in zip(parts, norms, strict=True))
        q_THD, k_TKD, v_TKD = basis.of_heads(rotate(q_THD, *angles), rotate(k_TKD, *angles), v_TKD)
        self._pool.write(attention.layer, self._batch.slots_T, k_TKD, v_TKD)
        return q_THD

    def _attend_gathered(
        self, attention: LayerAttention, q_THD: Tensor, gathered: GatheredRows, out_THD: Tensor
    ) -> None:
        prompts = self._batch.prompts
        assert prompts is not None
        k_LKD, v_LKD = launch_gather_rows(*self._pool.layer(attention.layer), gathered.blocks_N, q_THD.dtype)
        launch_dense_prefill_attention(
            q_THD,
            k_LKD,
            None,
            v_LKD,
            tiles=prompts.tiles,
            firsts_R=gathered.firsts_R,
            contexts_R=prompts.contexts_R,
            rule=attention,
            out_THW=out_THD,
        )

    def _splits_of(self, attention: LayerAttention, query_groups: QueryGroups) -> Splits:
        num_kv_heads = self._pool.layout.heads[attention.layer].num_heads
        key = attention.window, attention.chunk, num_kv_heads
        if key not in self._splits:
            self._splits[key] = Splits.of(
                query_groups.contexts_U,
                window=attention.window,
                chunk=attention.chunk,
                most=query_groups.most,
                num_heads=num_kv_heads,
                longest=query_groups.longest,
                resident=resident_programs(has_scales=self._pool.layout.has_scales),
            )
        return self._splits[key]


def kernel_heads(batch: DeviceBatch, pool: KVPool, angles: Angles) -> Heads:
    """Return the backend of the Triton kernels for one step."""
    heads = KernelHeads(batch, pool, angles)
    if batch.windowed is None:
        return heads
    return WindowedHeads(pool.layout, heads, KernelHeads(batch.windowed, pool, angles, gathers=False))


def is_worth_gathering(prompts: PromptRows, pool: KVPool, dtype: torch.dtype) -> bool:
    """Return True if gathering the prompts' keys first is faster. dtype: dtype of the queries."""
    layout, num_keys = pool.layout, sum(prompts.context_lens)
    largest = max(num_heads * dim for num_heads, dim in {*layout.heads})
    if 2 * num_keys * largest * dtype.itemsize > MOST_GATHERED_BYTES:
        return False
    seen = sum(queries * keys for queries, keys in zip(prompts.query_lens, prompts.context_lens, strict=True))
    return seen >= num_keys * (MIN_QUERIES_OF_CODES if layout.has_scales else MIN_QUERIES)


@dataclass(frozen=True)
class GatheredRows:
    """Blocks that hold all positions of each prompt, or a range of them, one row after the other."""

    # int32 block ids.
    blocks_N: Tensor
    # int32 offset of each row's keys among the keys of all blocks.
    firsts_R: Tensor

    @classmethod
    def of(cls, rows: PromptRows, pool: KVPool, begin: int = 0, end: int | None = None) -> GatheredRows:
        """Select the blocks of positions [begin, end) of each row; both are multiples of the block size."""
        block_size = pool.layout.block_size
        first, last = begin // block_size, None if end is None else end // block_size
        counts = [cdiv(length, block_size) for length in rows.context_lens]
        parts = [table[:count][first:last] for table, count in zip(rows.tables_RB, counts, strict=True)]
        begins = np.cumsum([0, *(len(part) for part in parts)])[:-1] * block_size
        (firsts_R,) = upload([begins], pool.device)
        return cls(torch.cat(parts), firsts_R)
