"""Multi-head latent attention for one step: DeepSeek-V2, arXiv:2405.04434, section 2.1.

The pool stores one row per token, (latent, rotated key). Every head's keys and values follow from it:

    key_h = (K_h latent, rotated key)      value_h = V_h latent      K_h: (N, C), V_h: (W, C), of one head

For rows with several queries they are computed once for all queries. For rows with one query they are not: K_h moves to
the query and V_h to the result ("absorbed"), so that all heads share one key per token, the row itself:

    q_h . key_h = (K_h^T q_nope, q_rope) . row      sum of w value_h = V_h (sum of w latent)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.attention import AttentionPlans, PromptQueries, ScoreRule, Singles, attend_prompt
from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.kernels.attention.rotary import rotate
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, Q queries of one row, R rows, H query heads of this rank, L keys, C latent_dim, P rope_dim, N nope_dim,
# W value_dim, D = N + P of a query's head, J = C + P of a row, F = P / 2


@dataclass(frozen=True)
class Expansion:
    """Matrices that expand latents into a rank's heads."""

    key_HNC: Tensor
    value_HWC: Tensor

    @property
    def latent_dim(self) -> int:
        return self.key_HNC.shape[2]

    def absorb_keys(self, q_RHD: Tensor) -> Tensor:
        """Return the queries to multiply with latent rows: (R, H, C + P)."""
        q_nope_RHN, q_rope_RHP = q_RHD.tensor_split((self.key_HNC.shape[1],), dim=-1)
        return torch.cat((torch.einsum("rhn,hnc->rhc", q_nope_RHN, self.key_HNC), q_rope_RHP), dim=-1)

    def values_of(self, latents_RHC: Tensor) -> Tensor:
        """Expand weighted sums of latents into values: (R, H, W)."""
        return torch.einsum("rhc,hwc->rhw", latents_RHC, self.value_HWC)


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
        """Return the rows that the pool stores: (T, C + P)."""
        return torch.cat((latent_TC, self._rotate(key_TP.unsqueeze(1)).squeeze(1)), dim=-1)

    def _rotate(self, x_THP: Tensor) -> Tensor:
        """Rotate. Deinterleaves queries and keys alike, so that their products are unaffected."""
        if self.is_interleaved:
            x_THP = torch.unflatten(x_THP, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(x_THP, self.cos_T1F, self.sin_T1F)


class LatentHeads(Protocol):
    """Latent-attention backend of one step, shared by every layer."""

    def store(self, layer: int, q_THD: Tensor, row_TJ: Tensor, *, norm: RMSNorm, expansion: Expansion) -> Tensor:
        """Norm latents, rotate keys and queries, and write the tokens' rows to the pool. Returns the queries.

        row: (T, C + P) before norm and rotation. q and row may be views. `attend` must get the same expansion.
        """
        ...

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        """Attend to the keys up to and including each query's own: (T, H, W).

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
        self._plan = AttentionPlans(batch, pool, dtype=rotation.cos_T1F.dtype).of(LayerAttention(layer=0, scale=scale))

    def store(self, layer: int, q_THD: Tensor, row_TJ: Tensor, *, norm: RMSNorm, expansion: Expansion) -> Tensor:
        rope_dim = self._rotation.rope_dim
        latent_TC, key_TP = row_TJ.tensor_split((-rope_dim,), dim=-1)
        self._pool.write_latents(layer, self._slots_T, self._rotation.rows(norm(latent_TC), key_TP))
        return self._rotation.queries(q_THD, rope_dim=rope_dim)

    def attend(self, layer: int, q_THD: Tensor, expansion: Expansion) -> Tensor:
        out_THW = q_THD.new_empty(*q_THD.shape[:2], expansion.value_HWC.shape[1])
        for prompt in self._plan.prompts:
            out_THW[prompt.first : prompt.end] = self._attend_prompt(layer, q_THD, prompt, expansion)
        for singles in self._plan.singles:
            out_THW[singles.tokens_R] = self._attend_singles(layer, q_THD, singles, expansion)
        return out_THW

    def _attend_prompt(self, layer: int, q_THD: Tensor, prompt: PromptQueries, expansion: Expansion) -> Tensor:
        rows_LD = prompt.gather(self._pool, layer, q_THD.dtype)[0, 0, 0]
        latent_LC, key_LP = rows_LD.tensor_split((expansion.latent_dim,), dim=-1)
        k_HLN, v_HLW = (latent_LC @ made.transpose(1, 2) for made in (expansion.key_HNC, expansion.value_HWC))
        k_HLD = torch.cat((k_HLN, key_LP.expand(len(k_HLN), -1, -1)), dim=-1)
        q_QH1D = q_THD[prompt.first : prompt.end].unsqueeze(2)
        return attend_prompt(q_QH1D, k_HLD, v_HLW, prompt.mask_QL, ScoreRule(self._scale)).squeeze(2)

    def _attend_singles(self, layer: int, q_THD: Tensor, singles: Singles, expansion: Expansion) -> Tensor:
        rows_R1LD = singles.gather(self._pool, layer, q_THD.dtype)[0]
        q_R1HD = expansion.absorb_keys(q_THD[singles.tokens_R]).unsqueeze(1)
        mask_R1HL = singles.mask_R11L.expand(-1, -1, q_R1HD.shape[2], -1)
        latents_R1LC = rows_R1LD[..., : expansion.latent_dim]
        out_R1HC = F.scaled_dot_product_attention(
            q_R1HD, rows_R1LD, latents_R1LC, attn_mask=mask_R1HL, scale=self._scale
        )
        return expansion.values_of(out_R1HC.squeeze(1))
