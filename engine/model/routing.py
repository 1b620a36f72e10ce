"""Which experts a token passes through, and what they weigh.

    scores = softmax(router x)                        Mixtral, Qwen, DeepSeek-V2
    scores = sigmoid(router x)                        DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), which chooses by
                                                      scores + bias, and weighs without the bias

Where experts lie in groups, a token's experts come from its best groups: those with the best expert, or for V3 the best
two together (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.shape import ExpertsConfig
from engine.layers.shards import ShardReader

# T tokens, E hidden_size, X experts, G groups of experts, C experts chosen for each token

_TINY = 1e-20  # keeps a sum of weights above zero


@dataclass(frozen=True)
class Routing:
    """One layer's router."""

    weight_XE: Tensor
    bias_X: Tensor | None  # fp32
    config: ExpertsConfig

    @classmethod
    def read(cls, reader: ShardReader, config: ExpertsConfig, name: str) -> Routing:
        """name: the router's, without `.weight`."""
        weight_XE = reader.tensor(f"{name}.weight")
        if config.scores_in_fp32:
            weight_XE = weight_XE.float()
        bias_X = reader.checkpoint.read(f"{name}.e_score_correction_bias") if config.scores == "sigmoid" else None
        return cls(weight_XE, None if bias_X is None else bias_X.float().to(reader.device), config)

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, best first, and their weights: chosen (T, C) int64, weights (T, C) fp32."""
        config = self.config
        logits_TX = F.linear(x_TE.to(self.weight_XE.dtype), self.weight_XE).float()
        scores_TX = logits_TX.softmax(dim=-1) if self.bias_X is None else logits_TX.sigmoid()
        wanted_TX = scores_TX if self.bias_X is None else scores_TX + self.bias_X
        if config.num_groups > 1:
            wanted_TX = self._within_groups(wanted_TX)
        chosen_TC = wanted_TX.topk(config.num_per_token, dim=-1).indices
        weights_TC = scores_TX.gather(1, chosen_TC)
        if config.normalizes_weights:
            weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + _TINY)
        return chosen_TC, weights_TC * config.weight_scale

    def _within_groups(self, wanted_TX: Tensor) -> Tensor:
        """-inf for experts outside of the token's best groups."""
        config = self.config
        wanted_TGX = torch.unflatten(wanted_TX, -1, (config.num_groups, -1))
        best = 1 if self.bias_X is None else 2
        group_TG = wanted_TGX.topk(best, dim=-1).values.sum(dim=-1)
        groups = group_TG.topk(config.num_groups_per_token, dim=-1).indices
        is_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, groups, False)
        return wanted_TGX.masked_fill(is_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
