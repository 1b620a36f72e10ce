"""Latent attention of a step on a GPU, with the formulas of latent_heads.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.attention.chosen_positions import IndexedTokens, Seekers
from engine.attention.chosen_slots import ChoosingQueries
from engine.attention.latent_heads import Expansion, Rotation
from engine.attention.triton_heads import GatheredRows
from engine.batch.device_batch import DeviceBatch, PromptRows
from engine.kernels.attention.absorb_queries import launch_absorb_queries
from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.dense_prefill import Carry, Slice, launch_dense_prefill_attention
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.latent_attention import launch_latent_decode_attention, splits_of_latents
from engine.kernels.attention.store_latents import launch_store_latents
from engine.kernels.language import cdiv
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, R rows, H query heads of this rank, L keys of all prompts, C latent_dim, P rope_dim, N nope_dim,
# W value_dim, D = N + P of a query's head, J = C + P of a row, Q queries of one part of the step


# Expanded keys and values of one layer, beside the pool.
EXPANDED_BYTES = 1 << 29


class KernelLatentHeads:
    """Implements LatentHeads with the Triton kernels.

    Rows with one query read the pool's rows in place. For the others, the rows of all prompts are gathered and expanded
    once for all heads: L * H * (N + W) numbers, up to EXPANDED_BYTES at a time. As in KernelHeads, launches for rows
    with one query depend only on shapes and `longest`.

    With sparse attention, each query whose positions were chosen becomes a row of its own.
    """

    def __init__(self, batch: DeviceBatch, pool: KVPool, rotation: Rotation, *, scale: float) -> None:
        """scale: factor of the scores."""
        self._batch = batch
        self._pool = pool
        self._rotation = rotation
        self._scale = scale
        self._splits: Splits | None = None
        self._prompts = _Prompts(batch.prompts, pool) if batch.prompts else None
        # Empty: queries see all positions.
        self._prompts_that_choose: list[ChoosingQueries] = []
        self._singles_that_choose: list[ChoosingQueries] = []
        self._knows_choosing = False

    def store(
        self,
        layer: int,
        q_THD: Tensor,
        row_TJ: Tensor,
        *,
        norm: RMSNorm,
        expansion: Expansion,
        indexed: IndexedTokens | None = None,
    ) -> Tensor:
        """See LatentHeads. If all rows have one query, the returned queries are absorbed: (T, H, J)."""
        if indexed is not None:
            indexed = self._rotation.indexed(indexed)
            row_TJ = torch.cat((row_TJ, indexed.key_TI), dim=-1)
        q_THD = self._store(layer, q_THD, row_TJ, norm, expansion)
        if indexed is not None:
            if not self._knows_choosing:
                self._find_choosing(indexed.index.top_k, expansion)
            for queries in (*self._singles_that_choose, *self._prompts_that_choose):
                queries.choose(indexed, self._pool, layer)
        return q_THD

    def _store(self, layer: int, q_THD: Tensor, row_TJ: Tensor, norm: RMSNorm, expansion: Expansion) -> Tensor:
        rotation = self._rotation
        stored = (q_THD, row_TJ, norm.weight, norm.eps, rotation.cos_T1F, rotation.sin_T1F, *self._pool.layer(layer))
        if self._prompts is None:
            return launch_absorb_queries(
                *stored, self._batch.slots_T, expansion.key_HNC, is_interleaved=rotation.is_interleaved
            )
        rotated_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        launch_store_latents(*stored, self._batch.slots_T, is_interleaved=rotation.is_interleaved, out_THN=rotated_THD)
        return rotated_THD

    def _find_choosing(self, top_k: int, expansion: Expansion) -> None:
        """Find the queries that choose positions; prompts attend densely only if none of them has to choose."""
        self._knows_choosing = True
        singles, rows = self._batch.query_groups, self._batch.prompts
        if singles and singles.longest > top_k:
            seekers = Seekers(singles.firsts_U, singles.contexts_U, singles.tables_UB, singles.longest)
            self._singles_that_choose.extend(
                ChoosingQueries.of(seekers, are_all=not rows, top_k=top_k, expansion=expansion)
            )
        if rows and max(rows.context_lens) > top_k:
            for seekers in _seekers(rows):
                self._prompts_that_choose.extend(
                    ChoosingQueries.of(seekers, are_all=False, top_k=top_k, expansion=expansion)
                )

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        if self._prompts is None:
            return self._attend_singles(layer, q_THD, expansion)
        out_THW = q_THD.new_empty(*q_THD.shape[:2], expansion.value_HWC.shape[1])
        if not self._prompts_that_choose:
            self._prompts.attend(layer, q_THD, expansion, self._scale, out_THW)
        for queries in self._prompts_that_choose:
            absorbed_QHJ = expansion.absorb_keys(q_THD[queries.tokens_Q])
            out_THW[queries.tokens_Q] = queries.attend(absorbed_QHJ, self._pool, layer, expansion, scale=self._scale)
        if singles := self._batch.query_groups:
            absorbed_RHJ = expansion.absorb_keys(q_THD.index_select(0, singles.firsts_U))
            out_THW[singles.firsts_U] = self._attend_singles(layer, absorbed_RHJ, expansion)
        return out_THW

    def _attend_singles(self, layer: int, absorbed_RHJ: Tensor, expansion: Expansion) -> Tensor:
        """Attend for rows with one query: (R, H, W)."""
        singles = self._batch.query_groups
        assert singles is not None and singles.most == 1
        if parts := self._singles_that_choose:
            absorbed = torch.split(absorbed_RHJ, [len(queries) for queries in parts])
            outs = [
                queries.attend(absorbed_QHJ, self._pool, layer, expansion, scale=self._scale)
                for queries, absorbed_QHJ in zip(parts, absorbed, strict=True)
            ]
            return outs[0] if len(outs) == 1 else torch.cat(outs)
        if self._splits is None:
            num_heads = absorbed_RHJ.shape[1]
            self._splits = splits_of_latents(singles.contexts_U, num_heads=num_heads, longest=singles.longest)
        return launch_latent_decode_attention(
            absorbed_RHJ,
            *self._pool.layer(layer),
            expansion.value_HWC,
            scale=self._scale,
            tables_RB=singles.tables_UB,
            contexts_R=singles.contexts_U,
            splits=self._splits,
        )


def _seekers(rows: PromptRows) -> Iterator[Seekers]:
    """Yield the queries of each row."""
    for row, (context, num_queries) in enumerate(zip(rows.context_lens, rows.query_lens, strict=True)):
        places_Q = torch.arange(num_queries, dtype=torch.int32, device=rows.tables_RB.device)
        yield Seekers(
            tokens_Q=rows.tiles.begins_R[row] + places_Q,
            contexts_Q=places_Q + (context - num_queries + 1),
            tables_RB=rows.tables_RB[row : row + 1],
            longest=context,
        )


class _Prompts:
    """Rows with several queries, whose gathered blocks are laid out row after row.

    They are processed in slices of positions if the expansion of all of them would take too much memory.
    """

    def __init__(self, rows: PromptRows, pool: KVPool) -> None:
        self._rows = rows
        self._pool = pool
        self._slices: list[tuple[Slice, GatheredRows]] = []

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion, scale: float, out_THW: Tensor) -> None:
        # The slices are the same for every layer.
        if not self._slices:
            self._slices = self._cut(q_THD, expansion)
        for part, gathered in self._slices:
            rows_LD = self._pool.read(layer, gathered.blocks_N, q_THD.dtype)[0, 0]
            rope_dim = q_THD.shape[-1] - expansion.key_HNC.shape[1]
            latents_LC, keys_LP = expansion.parts_of(rows_LD, rope_dim=rope_dim)
            k_LHN, v_LHW = (
                torch.unflatten(latents_LC @ made_HOC.flatten(0, 1).T, 1, made_HOC.shape[:2])
                for made_HOC in (expansion.key_HNC, expansion.value_HWC)
            )
            launch_dense_prefill_attention(
                q_THD,
                k_LHN,
                keys_LP,
                v_LHW,
                tiles=self._rows.tiles,
                firsts_R=gathered.firsts_R,
                contexts_R=self._rows.contexts_R,
                rule=AttentionRule(scale=scale),
                out_THW=out_THW,
                part=part,
            )

    def _cut(self, q_THD: Tensor, expansion: Expansion) -> list[tuple[Slice, GatheredRows]]:
        num_heads, value_dim, _ = expansion.value_HWC.shape
        key_bytes = num_heads * (expansion.key_HNC.shape[1] + value_dim) * q_THD.dtype.itemsize
        lens = self._rows.context_lens
        size = slice_size(lens, EXPANDED_BYTES // key_bytes, self._pool.layout.block_size)
        ends = range(size, max(lens) + size, size)
        carry = Carry.empty(len(q_THD), num_heads, value_dim, q_THD.device) if len(ends) > 1 else None
        parts = [Slice(end - size, end, is_last=end == ends[-1], carry=carry) for end in ends]
        return [(part, GatheredRows.of(self._rows, self._pool, part.begin, part.end)) for part in parts]


def slice_size(context_lens: list[int], most_keys: int, block_size: int) -> int:
    """Return the positions of each row per slice, such that a slice has at most `most_keys` keys over all rows.

    The result is a multiple of the block size and at least one block.
    """
    size = longest = cdiv(max(context_lens), block_size) * block_size
    while size > block_size and sum(min(size, length) for length in context_lens) > most_keys:
        size = cdiv(size // 2, block_size) * block_size
    return min(size, longest)
