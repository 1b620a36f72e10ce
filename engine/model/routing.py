"""A layer's router: see kernels/router.py, and for many tokens kernels/expert_choice.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import ExpertsConfig
from engine.kernels.moe.expert_router import MOST_TOKENS, RoutedTokens, new_counters, route
from engine.kernels.moe.top_k import ChoiceRule, choose_experts
from engine.layers.shards import ShardReader

# T tokens, E hidden_size, X experts to choose from, L logits: X, and one more where experts of all tokens are weighed


@dataclass(frozen=True)
class Routing:
    """One layer's router."""

    weight_LE: Tensor  # of the model's dtype; where logits are exact, on a CPU fp32
    bias_X: Tensor | None  # fp32
    counters: Tensor
    is_exact: bool  # whether logits are products in fp32, whatever the model's dtype
    rule: ChoiceRule

    @classmethod
    def read(
        cls,
        reader: ShardReader,
        config: ExpertsConfig,
        name: str,
        *,
        num_shared: int = 0,
        shared_gate_1E: Tensor | None = None,
    ) -> Routing:
        """name: the router's, without `.weight`. num_shared: experts of all tokens, behind the others in the bank.
        shared_gate: what weighs them."""
        bias_X = reader.checkpoint.read(f"{name}.e_score_correction_bias") if config.scores == "sigmoid" else None
        rule = ChoiceRule(
            num_choices=config.num_per_token,
            num_groups=config.num_groups,
            num_groups_per_token=config.num_groups_per_token,
            normalizes_weights=config.normalizes_weights,
            weight_scale=config.weight_scale,
            num_shared=num_shared,
            weighs_shared=shared_gate_1E is not None,
        )
        weight_LE = reader.tensor(f"{name}.weight")
        if shared_gate_1E is not None:
            weight_LE = torch.cat((weight_LE, shared_gate_1E))
        if config.scores_in_fp32 and not weight_LE.is_cuda:
            weight_LE = weight_LE.float()
        return cls(
            weight_LE,
            None if bias_X is None else bias_X.float().to(reader.device),
            new_counters(reader.device),
            config.scores_in_fp32,
            rule,
        )

    def __call__(self, x_TE: Tensor) -> RoutedTokens:
        """The experts of each token, best first, and their weights."""
        if len(x_TE) <= MOST_TOKENS:
            return route(x_TE, self.weight_LE, self.bias_X, self.counters, self.rule, is_exact=self.is_exact)
        return RoutedTokens(*choose_experts(self._logits(x_TE), self.bias_X, self.rule))

    def _logits(self, x_TE: Tensor) -> Tensor:
        """(T, L) in x's dtype, or in fp32."""
        if self.is_exact and x_TE.is_cuda and x_TE.dtype != torch.float32:
            # Products of two numbers of 16 bits are exact in fp32, in which they are summed.
            return torch.mm(x_TE, self.weight_LE.T, out_dtype=torch.float32)
        return F.linear(x_TE.to(self.weight_LE.dtype), self.weight_LE)
