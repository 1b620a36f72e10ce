"""Norms of a layer: where families put them, and the norm over all heads together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.kernels.rms_norm import rms_norm
from engine.layers.layers import RMSNorm
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Span

# T tokens, Q and K features of this rank's queries and keys, O features of a projection


class MLPNorms(NamedTuple):
    """Names of the norms before and after the MLP; empty: none."""

    before: str
    after: str


def mlp_norms(config: ModelConfig) -> MLPNorms:
    """Return the names of the MLP's norms. If attention has a norm after it, Llama's names shift by one."""
    if not config.has_post_norms:
        return MLPNorms("post_attention_layernorm", "")
    return MLPNorms("pre_feedforward_layernorm" if config.has_pre_norms else "", "post_feedforward_layernorm")


def read_norm(reader: ShardReader, config: ModelConfig, name: str, *, rows: Span | None = None) -> RMSNorm:
    """Read a norm, or rows of its weight, with the model's epsilon and rounding."""
    return reader.norm(
        name, config.rms_norm_eps, rows=rows, adds_one=config.norms_add_one, rounds_late=config.norms_round_late
    )


@dataclass(frozen=True)
class ProjectionNorm:
    """RMS norms over all heads of the queries, and over all heads of the keys.

    Each rank has some of the heads, so the ranks add their sums of squares. Heads that several ranks hold count once.
    """

    q_weight_Q: Tensor
    k_weight_K: Tensor
    # Features of all ranks.
    num_q: int
    num_k: int
    # Share of this rank's sum of squares of keys: 1 / number of ranks that hold the same heads.
    k_share: float
    eps: float
    parallel: TensorParallel

    @classmethod
    def read(
        cls, reader: ShardReader, config: ModelConfig, attention: str, q_rows: Span, kv_rows: Span
    ) -> ProjectionNorm:
        num_k = config.num_kv_heads * config.head_dim
        return cls(
            read_norm(reader, config, f"{attention}.q_norm", rows=q_rows).weight,
            read_norm(reader, config, f"{attention}.k_norm", rows=kv_rows).weight,
            config.num_q_heads * config.head_dim,
            num_k,
            num_k / ((kv_rows[1] - kv_rows[0]) * reader.parallel.size),
            config.rms_norm_eps,
            reader.parallel,
        )

    def __call__(self, rows_TO: Tensor) -> Tensor:
        """Norm the queries and keys of a projection's rows: queries, keys, values."""
        sizes = [len(self.q_weight_Q), len(self.k_weight_K)]
        q_TQ, k_TK, v_TK = torch.split(rows_TO, [*sizes, rows_TO.shape[-1] - sum(sizes)], dim=-1)
        if self.parallel.size == 1:
            q_TQ, k_TK = rms_norm(q_TQ, self.q_weight_Q, self.eps), rms_norm(k_TK, self.k_weight_K, self.eps)
            return torch.cat((q_TQ, k_TK, v_TK), dim=-1)
        squares_T2 = torch.stack((q_TQ.float().square().sum(-1), k_TK.float().square().sum(-1) * self.k_share), dim=-1)
        squares_T2 = self.parallel.all_reduce(squares_T2)
        q_TQ = _normed(q_TQ, squares_T2[:, :1] / self.num_q, self.q_weight_Q, self.eps)
        k_TK = _normed(k_TK, squares_T2[:, 1:] / self.num_k, self.k_weight_K, self.eps)
        return torch.cat((q_TQ, k_TK, v_TK), dim=-1)


def _normed(x_TO: Tensor, mean_T1: Tensor, weight_O: Tensor, eps: float) -> Tensor:
    # The product is in fp32 if the weight is: see RMSNorm.
    normed_TO = (x_TO.float() * torch.rsqrt(mean_T1 + eps)).to(weight_O.dtype)
    return (normed_TO * weight_O).to(x_TO.dtype)
