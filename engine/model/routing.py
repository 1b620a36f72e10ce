"""Expert router of a layer: kernels/moe/expert_router.py computes few tokens, kernels/moe/top_k.py many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import ExpertsConfig
from engine.kernels.moe.expert_router import MOST_TOKENS, RoutedTokens, launch_route, new_counters
from engine.kernels.moe.top_k import ChoiceRule, launch_choose_experts, reference_choose_experts
from engine.layers.shards import ShardReader

# T tokens, E hidden_size, X experts to choose from, L logits: X, plus one if shared experts are weighed


@dataclass(frozen=True)
class Routing:
    """Router of one layer."""

    # In the model's dtype; fp32 on a CPU if logits are exact.
    weight_LE: Tensor
    # fp32
    bias_X: Tensor | None
    counters: Tensor
    # True if logits are computed in fp32 for any model dtype.
    is_exact: bool
    rule: ChoiceRule
    # Added to the logits; of the weight's dtype.
    logit_bias_L: Tensor | None = None
    # fp32: factors of the experts' weights.
    factors_X: Tensor | None = None

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
        """Read a router.

        name: tensor name without `.weight`. num_shared: pieces of the shared expert, last in the bank. shared_gate:
        gate that weighs them.
        """
        bias_X = reader.checkpoint.read(f"{name}.e_score_correction_bias") if config.has_correction_bias else None
        factors_X = reader.checkpoint.read(f"{name}.per_expert_scale") if config.has_expert_scales else None
        rule = ChoiceRule(
            num_choices=config.num_per_token,
            scores=config.scores,
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
            reader.tensor(f"{name}.bias").to(weight_LE.dtype) if config.has_router_bias else None,
            None if factors_X is None else factors_X.float().to(reader.device),
        )

    def __call__(self, x_TE: Tensor) -> RoutedTokens:
        """Return the experts of each token, best first, and their weights."""
        if not can_fuse(x_TE):
            choose = launch_choose_experts if x_TE.is_cuda else reference_choose_experts
            return RoutedTokens(*choose(self._logits(x_TE), self.bias_X, self.rule, self.factors_X))
        return launch_route(
            x_TE,
            self.weight_LE,
            self.bias_X,
            self.counters,
            self.rule,
            is_exact=self.is_exact,
            logit_bias_L=self.logit_bias_L,
            factors_X=self.factors_X,
        )

    def _logits(self, x_TE: Tensor) -> Tensor:
        """Return the logits (T, L), in x's dtype or fp32."""
        if self.is_exact and x_TE.is_cuda and x_TE.dtype != torch.float32:
            # Products of two 16-bit numbers are exact in fp32, which also accumulates them.
            return torch.mm(x_TE, self.weight_LE.T, out_dtype=torch.float32)
        return F.linear(x_TE.to(self.weight_LE.dtype), self.weight_LE, self.logit_bias_L)


def can_fuse(x_TE: Tensor) -> bool:
    """Return True if one kernel computes logits and choice."""
    return x_TE.is_cuda and len(x_TE) <= MOST_TOKENS
