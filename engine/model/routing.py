"""A layer's router: see kernels/expert_choice.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.shape import ExpertsConfig
from engine.kernels.expert_choice import ChoiceRule, choose_experts
from engine.layers.shards import ShardReader

# T tokens, E hidden_size, X experts, C experts chosen for each token


@dataclass(frozen=True)
class Routing:
    """One layer's router."""

    weight_XE: Tensor  # of the model's dtype; where logits are exact, on a CPU fp32
    bias_X: Tensor | None  # fp32
    is_exact: bool  # whether logits are products in fp32, whatever the model's dtype
    rule: ChoiceRule

    @classmethod
    def read(cls, reader: ShardReader, config: ExpertsConfig, name: str) -> Routing:
        """name: the router's, without `.weight`."""
        bias_X = reader.checkpoint.read(f"{name}.e_score_correction_bias") if config.scores == "sigmoid" else None
        rule = ChoiceRule(
            num_choices=config.num_per_token,
            num_groups=config.num_groups,
            num_groups_per_token=config.num_groups_per_token,
            normalizes_weights=config.normalizes_weights,
            weight_scale=config.weight_scale,
        )
        weight_XE = reader.tensor(f"{name}.weight")
        if config.scores_in_fp32 and not weight_XE.is_cuda:
            weight_XE = weight_XE.float()
        return cls(
            weight_XE,
            None if bias_X is None else bias_X.float().to(reader.device),
            config.scores_in_fp32,
            rule,
        )

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, best first, and their weights: chosen (T, C) int64, weights (T, C) fp32."""
        return choose_experts(self._logits(x_TE), self.bias_X, self.rule)

    def _logits(self, x_TE: Tensor) -> Tensor:
        """(T, X) in x's dtype, or in fp32."""
        if self.is_exact and x_TE.is_cuda and x_TE.dtype != torch.float32:
            # Products of two numbers of 16 bits are exact in fp32, in which they are summed.
            return torch.mm(x_TE, self.weight_XE.T, out_dtype=torch.float32)
        return F.linear(x_TE.to(self.weight_XE.dtype), self.weight_XE)
