"""Which experts a token passes through, and what they weigh, by the router's logits.

    scores = softmax(logits)                          Mixtral, Qwen, DeepSeek-V2
    scores = sigmoid(logits)                          DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), which chooses by
                                                      scores + bias, and weighs without the bias

Where experts lie in groups, a token's experts come from its best groups: those with the best expert, or for V3 the best
two together (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl

# T tokens, X experts, G groups of experts, C experts chosen for each token

_TINY = 1e-20  # keeps a sum of weights above zero


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """What differs from model to model, beside the bias."""

    num_choices: int
    num_groups: int = 1
    num_groups_per_token: int = 1
    normalizes_weights: bool
    weight_scale: float = 1.0


def choose_experts(logits_TX: Tensor, bias_X: Tensor | None, rule: ChoiceRule) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights: chosen (T, C) int64, weights (T, C) fp32.

    logits: of any float dtype, contiguous. bias: fp32; None: scores are softmaxes. Of equal experts any comes first.
    """
    choose = launch_choose_experts if logits_TX.is_cuda else reference_choose_experts
    return choose(logits_TX, bias_X, rule)


def reference_choose_experts(logits_TX: Tensor, bias_X: Tensor | None, rule: ChoiceRule) -> tuple[Tensor, Tensor]:
    logits_TX = logits_TX.float()
    scores_TX = logits_TX.softmax(dim=-1) if bias_X is None else logits_TX.sigmoid()
    wanted_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if rule.num_groups > 1:
        wanted_TX = _within_groups(wanted_TX, rule, best=1 if bias_X is None else 2)
    chosen_TC = wanted_TX.topk(rule.num_choices, dim=-1).indices
    weights_TC = scores_TX.gather(1, chosen_TC)
    if rule.normalizes_weights:
        weights_TC = weights_TC / (weights_TC.sum(dim=-1, keepdim=True) + _TINY)
    return chosen_TC, weights_TC * rule.weight_scale


def _within_groups(wanted_TX: Tensor, rule: ChoiceRule, *, best: int) -> Tensor:
    """-inf for experts outside of the token's best groups, which have the greatest sum of their `best` experts."""
    wanted_TGX = torch.unflatten(wanted_TX, -1, (rule.num_groups, -1))
    group_TG = wanted_TGX.topk(best, dim=-1).values.sum(dim=-1)
    groups = group_TG.topk(rule.num_groups_per_token, dim=-1).indices
    is_out_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, groups, False)
    return wanted_TGX.masked_fill(is_out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def launch_choose_experts(logits_TX: Tensor, bias_X: Tensor | None, rule: ChoiceRule) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TX.shape
    assert logits_TX.is_contiguous() and num_experts % rule.num_groups == 0
    chosen_TC = torch.empty(num_tokens, rule.num_choices, dtype=torch.int64, device=logits_TX.device)
    weights_TC = torch.empty(num_tokens, rule.num_choices, dtype=torch.float32, device=logits_TX.device)
    if num_tokens:
        in_group = num_experts // rule.num_groups
        _choose_experts[(num_tokens,)](
            logits_TX,
            logits_TX if bias_X is None else bias_X,
            chosen_TC,
            weights_TC,
            rule.weight_scale,
            _TINY,
            C=rule.num_choices,
            G=rule.num_groups,
            X=in_group,
            CHOSEN_GROUPS=rule.num_groups_per_token,
            BLOCK_C=power_of_2(rule.num_choices),
            BLOCK_G=power_of_2(rule.num_groups),
            BLOCK_X=power_of_2(in_group),
            HAS_BIAS=bias_X is not None,
            NORMALIZES=rule.normalizes_weights,
            num_warps=1,
        )
    return chosen_TC, weights_TC


@jit
def _choose_experts(
    logits: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    weight_scale: tl.tensor,
    tiny: tl.tensor,
    C: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
) -> None:
    """One program: one token. X: experts of a group. Whatever the logits are, experts that there are get chosen."""
    token = tl.program_id(0).to(tl.int64)
    g, x, c = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_C)
    expert = g[:, None] * X + x[None, :]
    mask = (g < G)[:, None] & (x < X)[None, :]
    scores = tl.load(logits + token * G * X + expert, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        scores = 1.0 / (1.0 + tl.exp(-scores))
        wanted = scores + tl.load(bias + expert, mask=mask, other=0.0)
    else:
        scores = tl.exp(scores - tl.max(tl.max(scores, axis=1), axis=0))
        scores = scores / tl.sum(tl.sum(scores, axis=1), axis=0)
        wanted = scores
    wanted = tl.where(mask & (wanted == wanted), wanted, -float("inf"))
    if G > 1:
        first = tl.max(wanted, axis=1, keep_dims=True)
        group = first
        if HAS_BIAS:
            at = tl.argmax(wanted, axis=1, keep_dims=True)
            group += tl.max(tl.where(x[None, :] == at, -float("inf"), wanted), axis=1, keep_dims=True)
        is_in = g[:, None] < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(tl.where(is_in, -float("inf"), group), axis=0, keep_dims=True)
            is_in = is_in | (g[:, None] == best)
        wanted = tl.where(is_in, wanted, -float("inf"))
    wanted = tl.reshape(wanted, [BLOCK_G * BLOCK_X])
    scores = tl.reshape(scores, [BLOCK_G * BLOCK_X])
    place = tl.arange(0, BLOCK_G * BLOCK_X)
    experts = tl.zeros([BLOCK_C], tl.int32)
    parts = tl.zeros([BLOCK_C], tl.float32)
    for i in tl.static_range(C):
        best = tl.argmax(wanted, axis=0)
        experts = tl.where(c == i, best // BLOCK_X * X + best % BLOCK_X, experts)
        parts = tl.where(c == i, tl.sum(tl.where(place == best, scores, 0.0), axis=0), parts)
        wanted = tl.where(place == best, -float("inf"), wanted)
    if NORMALIZES:
        parts = parts / (tl.sum(parts, axis=0) + tiny)
    tl.store(chosen + token * C + c, experts.to(tl.int64), mask=c < C)
    tl.store(weights + token * C + c, parts * weight_scale, mask=c < C)
