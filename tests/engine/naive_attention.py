"""One layer's attention in fp64, token by token: the formulas of LayerAttention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.layer_attention import Angles, LayerAttention
from engine.batch.batch import Batch
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm

# T tokens, H query heads, K kv heads, N = H + 2 K or H, D head_dim, L keys


@dataclass(frozen=True)
class NaiveHeads:
    """Queries, keys and values of a step as they should be stored and attended to."""

    batch: Batch
    angles: Angles
    attention: LayerAttention
    heads_TND: Tensor
    num_kv: int

    def queries(self) -> Tensor:
        return self._turned(self._part(0), self.attention.q_norm)

    def keys(self) -> Tensor:
        return self._turned(self._part(1), self.attention.k_norm)

    def values(self) -> Tensor:
        return _normed(self._part(2), self.attention.v_norm)

    def attended(self, pool: KVPool) -> Tensor:
        """Attend to the keys and values that the pool holds: (T, H, D)."""
        q_THD, parts, token = self.queries(), [], 0
        for blocks, num_queries, context in zip(
            self.batch.block_tables, self.batch.query_lens.tolist(), self.batch.context_lens.tolist(), strict=True
        ):
            num_blocks = -(-context // pool.layout.block_size)
            kv_2KLD = pool.read(self.attention.layer, torch.from_numpy(blocks[:num_blocks].copy()), torch.float32)
            for position in range(context - num_queries, context):
                parts.append(_attended(q_THD[token], kv_2KLD.double(), position, self.attention))
                token += 1
        return torch.stack(parts)

    def _part(self, side: int) -> Tensor:
        """Return queries (0), keys (1) or values (2)."""
        num_kv = self.num_kv if self.attention.stores else 0
        num_q = self.heads_TND.shape[1] - 2 * num_kv
        return self.heads_TND.double().split((num_q, num_kv, num_kv), dim=1)[side]

    def _turned(self, x_TND: Tensor, norm: RMSNorm | None) -> Tensor:
        cos_T1F, sin_T1F = (angle.double() for angle in self.angles[self.attention.rope])
        x_TND, half = _normed(x_TND, norm), cos_T1F.shape[-1]
        a_TNF, b_TNF, rest = x_TND.split((half, half, x_TND.shape[-1] - 2 * half), dim=-1)
        return torch.cat((a_TNF * cos_T1F - b_TNF * sin_T1F, b_TNF * cos_T1F + a_TNF * sin_T1F, rest), dim=-1)


def _attended(q_HD: Tensor, kv_2KLD: Tensor, position: int, attention: LayerAttention) -> Tensor:
    seen = range(position + 1)
    if attention.window:
        seen = seen[-attention.window :]
    if attention.chunk:
        seen = seen[position // attention.chunk * attention.chunk :]
    k_HLD, v_HLD = kv_2KLD[:, :, seen.start : seen.stop].repeat_interleave(len(q_HD) // kv_2KLD.shape[1], dim=1)
    scores_HL = attention.scale * torch.einsum("hd,hld->hl", q_HD, k_HLD)
    if attention.soft_cap:
        scores_HL = attention.soft_cap * torch.tanh(scores_HL / attention.soft_cap)
    shares_HL = scores_HL.exp()
    totals_H = shares_HL.sum(-1) + (0.0 if attention.sinks_H is None else attention.sinks_H.double().exp())
    return torch.einsum("hl,hld->hd", shares_HL, v_HLD) / totals_H[:, None]


def _normed(x_TND: Tensor, norm: RMSNorm | None) -> Tensor:
    if norm is None:
        return x_TND
    return x_TND / (x_TND.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
