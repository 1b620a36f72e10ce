"""Choice of a token's experts and their weights from the router's logits.

    scores = softmax(logits)                          Mixtral, Qwen, DeepSeek-V2, gpt-oss, Gemma 4
    scores = sigmoid(logits)                          Llama 4; DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), which
                                                      chooses by scores + bias, and weighs without the bias

Normalized weights of softmaxes are softmaxes of the chosen logits. In Gemma 4 each weight has a factor per expert.

With groups of experts, a token's experts come from its best groups: those with the best expert, or for V3 the best sum
of two experts (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).

Shared experts follow the chosen ones. Their weight is 1, or in Qwen2-MoE sigmoid of the logit after the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl

# T tokens, X experts to choose from, G groups of them, C experts per token, shared ones included, L logits: X,
# optionally one more

# Keeps a sum of weights above zero.
TINY = 1e-20


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """Model-specific parameters of the choice, except for tensors."""

    num_choices: int
    num_groups: int = 1
    num_groups_per_token: int = 1
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalizes_weights: bool
    weight_scale: float = 1.0
    # Shared experts, numbered after those to choose from.
    num_shared: int = 0
    # Shared experts are weighed by their own logit.
    weighs_shared: bool = False

    @property
    def num_experts_of_token(self) -> int:
        return self.num_choices + self.num_shared


def reference_choose_experts(
    logits_TL: Tensor, bias_X: Tensor | None, rule: ChoiceRule, factors_X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, best first, and their weights: chosen (T, C) int64, weights (T, C) fp32.

    logits: any float dtype, contiguous. bias: fp32, added to sigmoids before the choice. factors: fp32, of each
    expert's weights. Ties are in arbitrary order.
    """
    assert bias_X is None or rule.scores == "sigmoid"
    logits_TL = logits_TL.float()
    num_experts = logits_TL.shape[1] - rule.weighs_shared
    logits_TX = logits_TL[:, :num_experts]
    scores_TX = logits_TX.softmax(dim=-1) if rule.scores == "softmax" else logits_TX.sigmoid()
    priority_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if rule.scores == "sigmoid" and bias_X is None:
        # Large logits have equal sigmoids.
        priority_TX = logits_TX
    if rule.num_groups > 1:
        priority_TX = _within_groups(priority_TX, rule, best=1 if bias_X is None else 2)
    chosen_TC = priority_TX.topk(rule.num_choices, dim=-1).indices
    weights_TC = scores_TX.gather(1, chosen_TC)
    if rule.normalizes_weights:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + TINY)
    weights_TC = weights_TC * rule.weight_scale
    if factors_X is not None:
        weights_TC = weights_TC * factors_X[chosen_TC]
    if not rule.num_shared:
        return chosen_TC, weights_TC
    shared = torch.arange(num_experts, num_experts + rule.num_shared, device=chosen_TC.device)
    weight_T1 = logits_TL[:, num_experts:].sigmoid() if rule.weighs_shared else torch.ones_like(logits_TL[:, :1])
    return (
        torch.cat((chosen_TC, shared.expand(len(chosen_TC), -1)), dim=1),
        torch.cat((weights_TC, weight_T1.expand(-1, rule.num_shared)), dim=1),
    )


def _within_groups(priority_TX: Tensor, rule: ChoiceRule, *, best: int) -> Tensor:
    """Set experts outside the token's best groups to -inf. Groups rank by the sum of their `best` top experts."""
    wanted_TGX = torch.unflatten(priority_TX, -1, (rule.num_groups, -1))
    group_TG = wanted_TGX.topk(best, dim=-1).values.sum(dim=-1)
    groups = group_TG.topk(rule.num_groups_per_token, dim=-1).indices
    is_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, groups, False)
    return wanted_TGX.masked_fill(is_out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def launch_choose_experts(
    logits_TL: Tensor, bias_X: Tensor | None, rule: ChoiceRule, factors_X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    num_tokens, num_logits = logits_TL.shape
    assert logits_TL.is_contiguous() and (bias_X is None or rule.scores == "sigmoid")
    chosen_TC, weights_TC = new_choices(num_tokens, rule, logits_TL.device)
    if num_tokens:
        _choose_experts[(num_tokens,)](
            logits_TL,
            bias_X,
            factors_X,
            chosen_TC,
            weights_TC,
            rule.weight_scale,
            TINY,
            **constants(rule, num_logits),
            num_warps=1,
        )
    return chosen_TC, weights_TC


def new_choices(num_tokens: int, rule: ChoiceRule, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate the outputs for a kernel to fill."""
    shape = num_tokens, rule.num_experts_of_token
    return torch.empty(shape, dtype=torch.int64, device=device), torch.empty(shape, dtype=torch.float32, device=device)


def constants(rule: ChoiceRule, num_logits: int) -> dict[str, int | bool]:
    """Return the compile-time constants of `choose`."""
    num_experts = num_logits - rule.weighs_shared
    assert num_experts % rule.num_groups == 0
    in_group = num_experts // rule.num_groups
    return {
        "C": rule.num_choices,
        "SHARED": rule.num_shared,
        "G": rule.num_groups,
        "X": in_group,
        "CHOSEN_GROUPS": rule.num_groups_per_token,
        "BLOCK_C": power_of_2(rule.num_experts_of_token),
        "BLOCK_G": power_of_2(rule.num_groups),
        "BLOCK_X": power_of_2(in_group),
        "IS_SIGMOID": rule.scores == "sigmoid",
        "NORMALIZES": rule.normalizes_weights,
        "WEIGHS_SHARED": rule.weighs_shared,
    }


@jit
def _choose_experts(
    logits: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    weight_scale: tl.tensor,
    tiny: tl.tensor,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    WEIGHS_SHARED: tl.constexpr,
) -> None:
    """One program: one token."""
    t = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    expert, is_expert = experts_of_places(G, X, BLOCK_G, BLOCK_X)
    row = logits + t[:, None] * (G * X + WEIGHS_SHARED)
    of_experts = tl.load(row + expert[None, :], mask=is_expert[None, :], other=0.0).to(tl.float32)
    of_shared = tl.zeros([1], tl.float32)
    if WEIGHS_SHARED:
        of_shared = tl.load(logits + t * (G * X + 1) + G * X).to(tl.float32)
    experts, parts = choose(
        of_experts, of_shared, bias, factors, weight_scale, tiny,
        C, SHARED, G, X, CHOSEN_GROUPS, BLOCK_C, BLOCK_G, BLOCK_X, IS_SIGMOID, NORMALIZES, WEIGHS_SHARED,
    )  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    place = t[:, None] * (C + SHARED) + c[None, :]
    tl.store(chosen + place, experts.to(tl.int64), mask=(c < C + SHARED)[None, :])
    tl.store(weights + place, parts, mask=(c < C + SHARED)[None, :])


@jit
def experts_of_places(
    G: tl.constexpr, X: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_X: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the expert at each place of a tile that pads groups to BLOCK_X places, and the mask of experts."""
    place = tl.arange(0, BLOCK_G * BLOCK_X)
    return place // BLOCK_X * X + place % BLOCK_X, (place // BLOCK_X < G) & (place % BLOCK_X < X)


@jit
def choose(
    logits: tl.tensor,
    of_shared: tl.tensor,
    bias: tl.tensor,
    factors: tl.tensor,
    weight_scale: tl.tensor,
    tiny: tl.tensor,
    C: tl.constexpr,
    SHARED: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    WEIGHS_SHARED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Choose experts of some tokens. Returns their indices (T, BLOCK_C) and weights.

    logits: (T, P) fp32 at the experts' places; of_shared: (T) logits of shared experts. X: experts per group. For any
    logits, including NaN, distinct existing experts are chosen.
    """
    expert, is_expert = experts_of_places(G, X, BLOCK_G, BLOCK_X)
    c, place = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_G * BLOCK_X)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        priority = logits
        if bias is not None:
            priority = scores + tl.load(bias + expert, mask=is_expert, other=0.0)[None, :]
    else:
        logits = tl.where(is_expert[None, :], logits, -float("inf"))
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
        priority = scores
    # Rank NaN below all numbers, but above padding and experts already chosen.
    priority = tl.where(is_expert[None, :], tl.where(priority > -1e30, priority, -1e30), -float("inf"))
    if G > 1:
        grouped = tl.reshape(priority, [priority.shape[0], BLOCK_G, BLOCK_X])
        group = tl.max(grouped, axis=2)
        g, x = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X)
        if bias is not None:
            at = tl.argmax(grouped, axis=2)
            group += tl.max(tl.where(x[None, None, :] == at[:, :, None], -float("inf"), grouped), axis=2)
        is_in = tl.zeros(group.shape, tl.int32)
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(tl.where(is_in > 0, -float("inf"), group), axis=1)
            is_in = tl.where(g[None, :] == best[:, None], 1, is_in)
        priority = tl.reshape(tl.where((is_in > 0)[:, :, None], grouped, -float("inf")), priority.shape)
    experts = tl.zeros([priority.shape[0], BLOCK_C], tl.int32)
    parts = tl.zeros([priority.shape[0], BLOCK_C], tl.float32)
    for i in tl.static_range(C):
        best = tl.argmax(priority, axis=1)
        is_best = place[None, :] == best[:, None]
        experts = tl.where(c[None, :] == i, (best // BLOCK_X * X + best % BLOCK_X)[:, None], experts)
        parts = tl.where(c[None, :] == i, tl.sum(tl.where(is_best, scores, 0.0), axis=1)[:, None], parts)
        priority = tl.where(is_best, -float("inf"), priority)
    if NORMALIZES:
        parts = parts / (tl.sum(parts, axis=1)[:, None] + tiny)
    parts = parts * weight_scale
    if factors is not None:
        parts = parts * tl.load(factors + experts, mask=(c < C)[None, :], other=0.0)
    if SHARED:
        weight = tl.full(of_shared.shape, 1.0, tl.float32)
        if WEIGHS_SHARED:
            weight = 1.0 / (1.0 + tl.exp(-of_shared))
        is_shared = (c >= C)[None, :]
        experts = tl.where(is_shared, G * X + c[None, :] - C, experts)
        parts = tl.where(is_shared, weight[:, None], parts)
    return experts, parts
