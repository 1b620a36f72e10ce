"""The heads of a step with latent attention on a GPU: see latent_heads.py, whose formulas these are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.attention.latent_heads import Expansion, Rotation
from engine.batch.device_batch import DeviceBatch, PromptRows, upload
from engine.kernels.decode_attention import splits_for
from engine.kernels.language import cdiv
from engine.kernels.latent_attention import HEADS_AT_ONCE, latent_decode_attention
from engine.kernels.latent_prefill import latent_prefill_attention
from engine.kernels.latent_write import write_latents
from engine.kv.pool import KVPool

# T tokens, R rows, H query heads of this rank, L keys of all prompts, C latent_dim, P rope_dim, N nope_dim,
# W value_dim, D = N + P of a query's head


class KernelLatentHeads:
    """Implements LatentHeads with the Triton kernels; on a CPU, with their references.

    Rows of one query read the pool's rows in place. For the others, the rows of all prompts are gathered and expanded
    once, for all heads, which takes L * H * (N + W) numbers beside the pool. As in KernelHeads, what is launched for
    rows of one query follows from shapes and `longest` only.
    """

    def __init__(self, batch: DeviceBatch, pool: KVPool, rotation: Rotation, *, scale: float) -> None:
        """scale: of queries."""
        self._batch = batch
        self._pool = pool
        self._rotation = rotation
        self._scale = scale
        self._prompts = _Prompts(batch.prompts, pool) if batch.prompts else None

    def store(self, layer: int, q_THD: Tensor, latent_TC: Tensor, key_TP: Tensor) -> Tensor:
        rows_TD = self._rotation.rows(latent_TC, key_TP)
        write_latents(*self._pool.layer(layer), self._batch.slots_T, rows_TD, rope_dim=key_TP.shape[-1])
        return self._rotation.queries(q_THD, rope_dim=key_TP.shape[-1])

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        out_THW = q_THD.new_empty(*q_THD.shape[:2], expansion.value_HWC.shape[1])
        if self._batch.singles:
            self._attend_singles(layer, q_THD, expansion, out_THW)
        if self._prompts:
            self._prompts.attend(layer, q_THD, expansion, self._scale, out_THW)
        return out_THW

    def _attend_singles(self, layer: int, q_THD: Tensor, expansion: Expansion, out_THW: Tensor) -> None:
        singles = self._batch.singles
        assert singles is not None
        num_rows, num_parts = len(singles.tokens_R), cdiv(q_THD.shape[1], HEADS_AT_ONCE)
        latents_RHC = latent_decode_attention(
            expansion.absorb_keys(q_THD.index_select(0, singles.tokens_R)),
            *self._pool.layer(layer),
            latent_dim=expansion.latent_dim,
            scale=self._scale,
            tables_RB=singles.tables_RB,
            contexts_R=singles.contexts_R,
            num_splits=splits_for(num_rows, num_parts, singles.longest, self._pool.device),
        )
        out_THW[singles.tokens_R] = expansion.values_of(latents_RHC)


class _Prompts:
    """The rows of several queries, whose blocks stand one row behind the other when they are gathered."""

    def __init__(self, rows: PromptRows, pool: KVPool) -> None:
        self._rows = rows
        self._pool = pool
        block_size = pool.layout.block_size
        counts = [cdiv(length, block_size) for length in rows.context_lens]
        self._blocks_B = torch.cat([table[:count] for table, count in zip(rows.tables_RB, counts, strict=True)])
        firsts = [block_size * sum(counts[:i]) for i in range(len(counts))]
        (self._firsts_R,) = upload([np.array(firsts)], pool.device)

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion, scale: float, out_THW: Tensor) -> None:
        rows_LD = self._pool.read(layer, self._blocks_B, q_THD.dtype)[0, 0]
        latents_LC, keys_LP = rows_LD.tensor_split((expansion.latent_dim,), dim=-1)
        k_LHN, v_LHW = (
            torch.unflatten(latents_LC @ made_HOC.flatten(0, 1).T, 1, made_HOC.shape[:2])
            for made_HOC in (expansion.key_HNC, expansion.value_HWC)
        )
        latent_prefill_attention(
            q_THD,
            k_LHN,
            keys_LP,
            v_LHW,
            tiles=self._rows.tiles,
            firsts_R=self._firsts_R,
            contexts_R=self._rows.contexts_R,
            scale=scale,
            out_THW=out_THW,
        )
