"""Multi-head latent attention for one step: DeepSeek-V2, arXiv:2405.04434, section 2.1.

The pool stores one row per token, (latent, rotated key). Every head's keys and values follow from it:

    key_h = (K_h latent, rotated key)      value_h = V_h latent      K_h: (N, C), V_h: (W, C), of one head

For rows with several queries they are computed once for all queries. For rows with one query they are not: K_h moves to
the query and V_h to the result ("absorbed"), so that all heads share one key per token, the row itself:

    q_h . key_h = (K_h^T q_nope, q_rope) . row      sum of w value_h = V_h (sum of w latent)

With sparse attention, a row ends with the token's index key, which attention ignores; see chosen_positions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import IndexConfig
from engine.attention.attention import AttentionPlans, PromptQueries, ScoreRule, Singles, attend_prompt
from engine.attention.chosen_positions import ChosenPositions, IndexedTokens, Seekers
from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.kernels.attention.rotary import rotate
from engine.kernels.quant.row_quantization import dequantize_rows
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, Q queries of one row, R rows, H query heads of this rank, L keys, C latent_dim, P rope_dim, N nope_dim,
# W value_dim, D = N + P of a query's head, J = C + P of a row, F = P / 2, I numbers of an index key, U chosen keys


@dataclass(frozen=True)
class Expansion:
    """Matrices that expand latents into a rank's heads."""

    key_HNC: Tensor
    value_HWC: Tensor

    @property
    def latent_dim(self) -> int:
        return self.key_HNC.shape[2]

    def parts_of(self, rows_LD: Tensor, *, rope_dim: int) -> tuple[Tensor, Tensor]:
        """Return the latents (L, C) and the rotated keys (L, P) of rows of the pool."""
        latent_LC, key_LP, _ = rows_LD.tensor_split((self.latent_dim, self.latent_dim + rope_dim), dim=-1)
        return latent_LC, key_LP

    def absorb_keys(self, q_RHD: Tensor) -> Tensor:
        """Return the queries to multiply with latent rows: (R, H, C + P)."""
        q_nope_RHN, q_rope_RHP = q_RHD.tensor_split((self.key_HNC.shape[1],), dim=-1)
        return torch.cat((torch.einsum("rhn,hnc->rhc", q_nope_RHN, self.key_HNC), q_rope_RHP), dim=-1)


@dataclass(frozen=True)
class Rotation:
    """Rotation of a step's queries and keys."""

    cos_T1F: Tensor
    sin_T1F: Tensor
    # True if rotary pairs are adjacent.
    is_interleaved: bool

    @property
    def rope_dim(self) -> int:
        return 2 * self.cos_T1F.shape[-1]

    def queries(self, q_THD: Tensor, *, rope_dim: int) -> Tensor:
        """Rotate the last `rope_dim` numbers of each query."""
        q_nope_THN, q_rope_THP = q_THD.tensor_split((-rope_dim,), dim=-1)
        return torch.cat((q_nope_THN, self._rotate(q_rope_THP)), dim=-1)

    def rows(self, latent_TC: Tensor, key_TP: Tensor) -> Tensor:
        """Return the rows that the pool stores, without index keys: (T, C + P)."""
        return torch.cat((latent_TC, self._rotate(key_TP.unsqueeze(1)).squeeze(1)), dim=-1)

    def indexed(self, tokens: IndexedTokens) -> IndexedTokens:
        """Rotate index queries and keys."""
        return replace(
            tokens,
            q_TGI=self.index_heads(tokens.q_TGI, tokens.index),
            key_TI=self.index_heads(tokens.key_TI.unsqueeze(1), tokens.index).squeeze(1),
        )

    def index_heads(self, x_TGI: Tensor, index: IndexConfig) -> Tensor:
        """Rotate the first `rope_dim` numbers of each index query or key."""
        rotation = replace(self, is_interleaved=index.is_interleaved)
        return torch.cat((rotation._rotate(x_TGI[..., : self.rope_dim]), x_TGI[..., self.rope_dim :]), dim=-1)

    def _rotate(self, x_THP: Tensor) -> Tensor:
        """Rotate. Deinterleaves queries and keys alike, so that their products are unaffected."""
        if self.is_interleaved:
            x_THP = torch.unflatten(x_THP, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_THP, self.cos_T1F, self.sin_T1F)


class LatentHeads(Protocol):
    """Latent-attention backend of one step, shared by every layer."""

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
        """Norm latents, rotate keys and queries, and write the tokens' rows to the pool. Returns the queries.

        row: (T, C + P) before norm and rotation. q and row may be views. `attend` must get the same expansion.
        indexed: outputs of the layer's indexer, before rotation. The positions that it chooses hold for this layer and
        the next ones without an indexer.
        """
        ...

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        """Attend to the keys up to each query's own, or only to the chosen ones: (T, H, W).

        q_THD: result of `store` for this layer.
        """
        ...


class TorchLatentHeads:
    """Implements LatentHeads with torch operations, gathering the blocks of each step."""

    def __init__(self, batch: Batch, pool: KVPool, rotation: Rotation, *, scale: float) -> None:
        """scale: factor of the scores."""
        self._pool = pool
        self._rotation = rotation
        self._scale = scale
        self._slots_T = torch.from_numpy(batch.slots).to(pool.device)
        self._positions_T = torch.from_numpy(batch.positions).to(pool.device)
        self._plan = AttentionPlans(batch, pool, dtype=rotation.cos_T1F.dtype).of(LayerAttention(layer=0, scale=scale))
        # One for each part of the plan, from the last layer that has an indexer.
        self._chosen: list[ChosenPositions | None] = [None] * (len(self._plan.prompts) + len(self._plan.singles))

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
        rope_dim = self._rotation.rope_dim
        latent_TC, key_TP = row_TJ.tensor_split((-rope_dim,), dim=-1)
        row_TJ = self._rotation.rows(norm(latent_TC), key_TP)
        if indexed is not None:
            indexed = self._rotation.indexed(indexed)
            row_TJ = torch.cat((row_TJ, indexed.key_TI), dim=-1)
        self._pool.write_latents(layer, self._slots_T, row_TJ)
        if indexed is not None:
            self._chosen = [indexed.choose(self._pool, layer, seekers) for seekers in self._seekers()]
        return self._rotation.queries(q_THD, rope_dim=rope_dim)

    def _seekers(self) -> Iterator[Seekers]:
        """Yield the queries of each part of the plan."""
        parts: list[PromptQueries | Singles] = [*self._plan.prompts, *self._plan.singles]
        for part in parts:
            if isinstance(part, PromptQueries):
                tokens_Q = torch.arange(part.first, part.end, device=self._pool.device)
            else:
                tokens_Q = part.tokens_R
            # A latent row has one side and one head, so its runs are the blocks.
            yield Seekers(tokens_Q, self._positions_T[tokens_Q] + 1, part.runs_2RKB[0, :, 0], part.most_keys)

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        out_THW = q_THD.new_empty(*q_THD.shape[:2], expansion.value_HWC.shape[1])
        chosen = iter(self._chosen)
        for prompt in self._plan.prompts:
            out_THW[prompt.first : prompt.end] = self._attend_prompt(layer, q_THD, prompt, expansion, next(chosen))
        for singles in self._plan.singles:
            if (positions := next(chosen)) is None:
                out_THW[singles.tokens_R] = self._attend_singles(layer, q_THD, singles, expansion)
            else:
                out_THW[singles.tokens_R] = self._attend_chosen(layer, q_THD, positions, expansion)
        return out_THW

    def _attend_prompt(
        self,
        layer: int,
        q_THD: Tensor,
        prompt: PromptQueries,
        expansion: Expansion,
        chosen: ChosenPositions | None,
    ) -> Tensor:
        """Attend for a row with several queries. Keys not chosen are masked, because other queries need them."""
        rows_LD = prompt.gather(self._pool, layer, q_THD.dtype)[0, 0, 0]
        mask_QL = prompt.mask_QL if chosen is None else chosen.mask(rows_LD.shape[0], q_THD.dtype)
        latent_LC, key_LP = expansion.parts_of(rows_LD, rope_dim=self._rotation.rope_dim)
        k_HLN, v_HLW = (latent_LC @ made.transpose(1, 2) for made in (expansion.key_HNC, expansion.value_HWC))
        k_HLD = torch.cat((k_HLN, key_LP.expand(len(k_HLN), -1, -1)), dim=-1)
        q_QH1D = q_THD[prompt.first : prompt.end].unsqueeze(2)
        return attend_prompt(q_QH1D, k_HLD, v_HLW, mask_QL, ScoreRule(self._scale)).squeeze(2)

    def _attend_singles(self, layer: int, q_THD: Tensor, singles: Singles, expansion: Expansion) -> Tensor:
        rows_R1LD = singles.gather(self._pool, layer, q_THD.dtype)[0]
        return self._attend_rows(q_THD[singles.tokens_R], rows_R1LD, singles.mask_R11L, expansion)

    def _attend_chosen(self, layer: int, q_THD: Tensor, chosen: ChosenPositions, expansion: Expansion) -> Tensor:
        codes, scales = self._pool.read_slots(layer, chosen.slots_QU.flatten())
        if scales is not None:
            codes = dequantize_rows(codes, scales, q_THD.dtype, exact=self._pool.layout.exact_dims[layer])
        rows_RUD = torch.unflatten(codes.to(q_THD.dtype), 0, chosen.slots_QU.shape)
        # A previous owner of the block may have left NaN there.
        rows_RUD.masked_fill_(~chosen.is_seen_QU.unsqueeze(-1), 0)
        mask_R11U = chosen.mask_of_chosen(q_THD.dtype)[:, None, None]
        return self._attend_rows(q_THD[chosen.tokens_Q], rows_RUD.unsqueeze(1), mask_R11U, expansion)

    def _attend_rows(self, q_RHD: Tensor, rows_R1LD: Tensor, mask_R11L: Tensor, expansion: Expansion) -> Tensor:
        """Attend for rows with one query each, to keys as the pool stores them: (R, H, W)."""
        q_R1HD = expansion.absorb_keys(q_RHD).unsqueeze(1)
        mask_R1HL = mask_R11L.expand(-1, -1, q_R1HD.shape[2], -1)
        latents_R1LC = rows_R1LD[..., : expansion.latent_dim]
        out_R1HC = F.scaled_dot_product_attention(
            q_R1HD, rows_R1LD[..., : q_R1HD.shape[-1]], latents_R1LC, attn_mask=mask_R1HL, scale=self._scale
        )
        return torch.einsum("rhc,hwc->rhw", out_R1HC.squeeze(1), expansion.value_HWC)
