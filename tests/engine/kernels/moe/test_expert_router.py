"""Fused MoE router compared with separate product, choice and sorting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.moe.expert_router import MOST_TOKENS, launch_route, new_counters
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.top_k import ChoiceRule, reference_choose_experts
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

QWEN3 = ChoiceRule(num_choices=8, normalizes_weights=True)
QWEN2 = ChoiceRule(num_choices=4, normalizes_weights=False, num_shared=4, weighs_shared=True)
V2 = ChoiceRule(num_choices=6, num_groups=8, num_groups_per_token=3, normalizes_weights=False, num_shared=2)
V3 = ChoiceRule(
    num_choices=8, num_groups=8, num_groups_per_token=4, scores="sigmoid", normalizes_weights=True, weight_scale=2.5
)
ALL = ChoiceRule(num_choices=2, normalizes_weights=True, num_shared=1)
CASES = [(QWEN3, 128, False), (QWEN2, 60, False), (V2, 160, False), (replace(V3, num_shared=1), 256, True)]
# Split among programs, the last of which has fewer inputs.
HIDDEN = 600


@pytest.mark.parametrize(
    ("rule", "num_experts", "has_bias", "num_tokens", "has_more"),
    [
        *quick(
            [(*case, *more) for case in CASES for more in ((1, False), (23, True))],
            [(*CASES[1], 23, True), (*CASES[3], 1, False)],
        ),
        (ALL, 5, False, MOST_TOKENS, False),
    ],
)
def test_fused_router_equals_its_parts(
    rule: ChoiceRule, num_experts: int, has_bias: bool, num_tokens: int, has_more: bool
) -> None:
    """has_more: a bias of the logits, as in gpt-oss, and factors of experts, as in Gemma 4."""
    logit_bias, factors = None, None
    if has_more:
        logit_bias, factors = random(num_experts + rule.weighs_shared, seed=3), random(num_experts)
    x, weight = random(num_tokens, HIDDEN), random(num_experts + rule.weighs_shared, HIDDEN, seed=1) / 20
    bias, counters = random(num_experts, seed=2) / 9 if has_bias else None, new_counters(DEVICE)
    expected = reference_choose_experts(F.linear(x, weight, logit_bias), bias, rule, factors)
    # Twice, because counters must be reset.
    for _ in range(2):
        chosen, weights, tiles = launch_route(
            x, weight, bias, counters, rule, is_exact=True, logit_bias_L=logit_bias, factors_X=factors
        )
        assert torch.equal(chosen, expected[0]) and not counters.any()
        torch.testing.assert_close(weights, expected[1], atol=1e-5, rtol=1e-4)
        rows, of_all = tiles.rows, num_experts + rule.num_shared
        choice_P, expert_B = launch_sort_into_tiles(chosen, num_experts=of_all, rows=rows)
        assert torch.equal(tiles.expert_B, expert_B)
        used = (expert_B < of_all).repeat_interleave(rows)
        assert torch.equal(tiles.choice_P[used], choice_P[used])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_does_not_depend_on_other_tokens(dtype: torch.dtype) -> None:
    x, weight, counters = (
        random(40, HIDDEN, dtype=dtype),
        random(129, HIDDEN, dtype=dtype, seed=1) / 20,
        new_counters(DEVICE),
    )
    rule = replace(QWEN3, num_shared=1, weighs_shared=True)
    together = launch_route(x, weight, None, counters, rule, is_exact=False)
    for first, end in ((0, 1), (3, 20), (17, 40)):
        alone = launch_route(x[first:end], weight, None, counters, rule, is_exact=False)
        assert torch.equal(alone.chosen_TC, together.chosen_TC[first:end])
        # The interpreter uses NumPy products, whose summation order may depend on the number of rows.
        torch.testing.assert_close(alone.weights_TC, together.weights_TC[first:end], rtol=2e-6, atol=0)


def test_inexact_logits_are_rounded() -> None:
    """Experts with equal logits in fp16 are chosen in order; with exact logits, by value."""
    x = torch.ones(1, 256, dtype=torch.float16, device=DEVICE)
    weight = torch.zeros(32, 256, dtype=torch.float16, device=DEVICE)
    # Differences below the resolution of fp16.
    weight[:, 0], weight[:, 1] = 256.0, torch.arange(32) / 512
    rule = ChoiceRule(num_choices=2, normalizes_weights=True)
    chosen = [
        launch_route(x, weight, None, new_counters(DEVICE), rule, is_exact=is_exact).chosen_TC.tolist()
        for is_exact in (False, True)
    ]
    assert chosen == [[[0, 1]], [[31, 30]]]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize(("rule", "num_experts", "has_bias"), CASES)
def test_nan_logits_fill_all_tiles(rule: ChoiceRule, num_experts: int, has_bias: bool) -> None:
    """Each choice has its place in a tile, so that no output is uninitialized."""
    x, weight = random(9, HIDDEN), random(num_experts + rule.weighs_shared, HIDDEN, seed=1)
    x[4:] = torch.nan
    bias = random(num_experts) if has_bias else None
    chosen, _, tiles = launch_route(x, weight, bias, new_counters(DEVICE), rule, is_exact=True)
    of_all = num_experts + rule.num_shared
    assert chosen.min() >= 0 and chosen.max() < of_all
    placed = tiles.choice_P[(tiles.expert_B < of_all).repeat_interleave(tiles.rows)]
    assert sorted(placed[placed < chosen.numel()].tolist()) == list(range(chosen.numel()))
