"""An EAGLE-3 head in plain torch: its definition, as it is trained. Li et al. 2025, arXiv:2503.01840.

One decoder layer beside the model. At slot t it reads the embedding of token t and what is known of position t - 1, and
says which token follows token t:

    g_t     = fc(hidden states of position t - 1 after three of the model's layers)      g_0 = 0: there is none before
    x_t     = [input_layernorm(embedding of token t), hidden_norm(g_t)]                  2 E wide
    y_t     = g_t + attention(x)_t        keys and values of slots 0 .. t
    a_t     = y_t + mlp(post_attention_layernorm(y_t))
    logits  = lm_head(norm(a_t))          of token t + 1, over the draft vocabulary

A further token is guessed with a_t in the place of g_(t+1), which the model has not computed yet. So it is trained
("training-time test"): step k of the chain that begins at slot t stands at slot t + k, with the a of step k - 1. It
attends to the slots up to t as they were in step 0, and to its own chain since then:

    step 0, slot t        0 .. t
    step 1, slot t + 1    0 .. t, (t + 1 of step 1)
    step 2, slot t + 2    0 .. t, (t + 1 of step 1), (t + 2 of step 2)

so that one matrix of scores serves all steps, and each step after the first adds one column.

Names of the modules are those of published checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.model.shape import ModelConfig

# B texts, T tokens of the longest, E hidden_size, H query heads, K kv heads, G = H / K, D head_dim, R rotated pairs,
# V draft vocabulary, S slots

Rotation = tuple[Tensor, Tensor]  # cos and sin, (S, 1, R)


class Norm(nn.Module):
    """x / rms(x) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps) * self.weight


@dataclass
class Chain:
    """What the steps of all chains have left for those after them."""

    keys_BTKD: Tensor  # of step 0
    values_BTKD: Tensor
    later: list[tuple[Tensor, Tensor]]  # keys and values of each further step, by the slot where its chain began


class EagleHead(nn.Module):
    def __init__(self, config: ModelConfig, *, draft_vocab_size: int) -> None:
        """Of the shape of one of the model's layers."""
        super().__init__()
        hidden = config.hidden_size
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False)

    def fuse(self, fused_BTE3: Tensor) -> Tensor:
        """g: (B, T, E) of slots 0 to T - 1 from the model's hidden states (B, T, 3 E) of positions 0 to T - 1, the last
        of which is not used."""
        g_BTE: Tensor = F.pad(self.fc(fused_BTE3[:, :-1]).float(), (0, 0, 1, 0))
        return g_BTE

    def step(
        self, g_BTE: Tensor, embedded_BTE: Tensor, rotation: Rotation, chain: Chain | None, *, first: int = 0
    ) -> tuple[Tensor, Chain]:
        """One step of chains, in step 0 of all that begin at slots 0 to T - 1. chain: of the steps before; None in it.

        embedded: of the tokens where the chains stand; rotation: of their slots. Returns a (B, T, E), of step 0 without
        the `first` chains: further steps are of those that are left.
        """
        a_BTE, chain = self.midlayer(g_BTE, embedded_BTE, rotation, chain, first)
        return a_BTE, chain

    def logits(self, a_NE: Tensor) -> Tensor:
        """(…, E) -> (…, V)."""
        logits: Tensor = self.lm_head(self.norm(a_NE))
        return logits


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = _MLP(hidden, config.intermediate_size)

    def forward(
        self, g_BTE: Tensor, embedded_BTE: Tensor, rotation: Rotation, chain: Chain | None, first: int
    ) -> tuple[Tensor, Chain]:
        x_BTE2 = torch.cat((self.input_layernorm(embedded_BTE), self.hidden_norm(g_BTE)), dim=-1)
        keys, values = self.self_attn.keys_and_values(x_BTE2, rotation)
        if chain is None:
            chain = Chain(keys, values, [])
        else:
            chain = Chain(chain.keys_BTKD, chain.values_BTKD, [*chain.later, (keys, values)])
        rotation = rotation[0][first:], rotation[1][first:]
        y_BTE = g_BTE[:, first:] + self.self_attn(x_BTE2[:, first:], rotation, chain).float()
        return y_BTE + self.mlp(self.post_attention_layernorm(y_BTE)).float(), chain


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self._dim, self._groups = dim, config.num_q_heads // config.num_kv_heads
        self.q_proj = nn.Linear(2 * hidden, config.num_q_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_q_heads * dim, hidden, bias=False)

    def keys_and_values(self, x_BTE2: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        keys_BTKD = self.k_proj(x_BTE2).unflatten(-1, (-1, self._dim))
        return _rotate(keys_BTKD, rotation), self.v_proj(x_BTE2).unflatten(-1, (-1, self._dim))

    def forward(self, x_BTE2: Tensor, rotation: Rotation, chain: Chain) -> Tensor:
        queries = _rotate(self.q_proj(x_BTE2).unflatten(-1, (-1, self._dim)), rotation) / math.sqrt(self._dim)
        q_BTKGD = torch.unflatten(queries, 2, (-1, self._groups))
        q_BKGTD = q_BTKGD.permute(0, 2, 3, 1, 4)
        scores_BKGTS = (q_BKGTD @ chain.keys_BTKD.permute(0, 2, 3, 1).unsqueeze(2)).float()
        num_chains, num_slots = scores_BKGTS.shape[-2:]
        is_later_TS = torch.ones(num_chains, num_slots, dtype=torch.bool).triu(1 + num_slots - num_chains)
        scores = [scores_BKGTS.masked_fill(is_later_TS, -torch.inf)]
        for keys_BTKD, _ in chain.later:
            scores.append((q_BTKGD * keys_BTKD.unsqueeze(3)).sum(-1, keepdim=True).float().permute(0, 2, 3, 1, 4))
        weights = torch.cat(scores, dim=-1).softmax(-1).to(q_BKGTD.dtype)
        mixed_BKGTD = weights[..., :num_slots] @ chain.values_BTKD.permute(0, 2, 1, 3).unsqueeze(2)
        for i, (_, values_BTKD) in enumerate(chain.later, num_slots):
            mixed_BKGTD = mixed_BKGTD + weights[..., i : i + 1] * values_BTKD.permute(0, 2, 1, 3).unsqueeze(2)
        attended: Tensor = self.o_proj(mixed_BKGTD.permute(0, 3, 1, 2, 4).flatten(2))
        return attended


class _MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return product


def _rotate(x_BTND: Tensor, rotation: Rotation) -> Tensor:
    """Pairs lie half a head apart, as in the Llama family. In fp32, and back."""
    cos_T1R, sin_T1R = rotation
    first, second = x_BTND.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    return rotated.to(x_BTND.dtype)
