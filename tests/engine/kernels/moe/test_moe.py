"""Choice of experts, and fused MoE, compared with torch; for any logits, existing experts are chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.expert_sum import launch_sum_experts, reference_sum_experts
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.fused_experts import ExpertBiases, launch_fused_experts
from engine.kernels.moe.top_k import ChoiceRule, launch_choose_experts, reference_choose_experts
from engine.kernels.rms_norm import ExpertSum, launch_add_rms_norm, reference_add_rms_norm
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.support.grids import quick
from tests.support.product_references import reference_fused_experts, reference_sort_into_tiles

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

QWEN = ChoiceRule(num_choices=8, normalizes_weights=True)
V2 = ChoiceRule(num_choices=6, num_groups=8, num_groups_per_token=3, normalizes_weights=False, weight_scale=16.0)
V3 = ChoiceRule(
    num_choices=8, num_groups=8, num_groups_per_token=4, scores="sigmoid", normalizes_weights=True, weight_scale=2.5
)
GPT_OSS = ChoiceRule(num_choices=4, normalizes_weights=True)
LLAMA4 = ChoiceRule(num_choices=1, normalizes_weights=False, scores="sigmoid", num_shared=1)
V2_LITE = ChoiceRule(num_choices=6, normalizes_weights=False, num_shared=2)
QWEN2 = ChoiceRule(num_choices=4, normalizes_weights=False, num_shared=4, weighs_shared=True)
V3_SHARED = replace(V3, num_shared=1)
MIXTRAL = ChoiceRule(num_choices=2, normalizes_weights=True)


@pytest.mark.parametrize(
    ("rule", "num_experts", "has_bias"),
    [
        *quick([(QWEN, 128, False), (V2_LITE, 64, False), (V3, 256, True)], ()),
        (V2, 160, False),
        (MIXTRAL, 8, False),
        (QWEN, 60, False),
        (QWEN2, 60, False),
        (V3_SHARED, 256, True),
        (replace(V3, num_groups=1, num_groups_per_token=1), 60, True),
        (LLAMA4, 16, False),
    ],
)
def test_choices_equal_torch(rule: ChoiceRule, num_experts: int, has_bias: bool) -> None:
    """With factors of experts, which `test_choices_follow_published_routers` omits."""
    logits = random(9, num_experts + rule.weighs_shared)
    bias = random(num_experts, seed=1) if has_bias else None
    factors = random(num_experts, seed=2)
    chosen, weights = launch_choose_experts(logits, bias, rule, factors)
    expected, expected_weights = reference_choose_experts(logits, bias, rule, factors)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("choose", [launch_choose_experts, reference_choose_experts])
def test_choices_follow_published_routers(choose: Any) -> None:
    """Logits are so large that softmaxes or sigmoids of several are equal."""
    logits, factors = random(9, 32) * 30, random(32, seed=2)
    chosen, weights = choose(logits, None, GPT_OSS)
    best = logits.topk(4)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))
    # Gemma 4 weighs an expert's share by the expert's own factor.
    torch.testing.assert_close(choose(logits, None, GPT_OSS, factors)[1], best.values.softmax(-1) * factors[chosen])
    chosen, weights = choose(logits + 60, None, LLAMA4)
    assert chosen.tolist() == [[of_token, 32] for of_token in logits.argmax(-1).tolist()]
    torch.testing.assert_close(weights, torch.ones(9, 2, device=DEVICE))


# The interpreter warns about NaN.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("rule", "has_bias"), [(V2, False), (V3, True), (QWEN, False)])
def test_nan_logits_choose_existing_experts(rule: ChoiceRule, has_bias: bool) -> None:
    """No choice may index past the weights: groups of 20 experts do not fill their tile."""
    logits = random(3, 160)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5:] = torch.nan
    chosen, _ = launch_choose_experts(logits, random(160) if has_bias else None, rule)
    assert chosen.min() >= 0 and chosen.max() < 160
    assert all(len(set(of_token)) == rule.num_choices for of_token in chosen.tolist()), "experts must be distinct"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_expert_sum_alone_and_fused_with_a_norm(adds: bool, dtype: torch.dtype) -> None:
    out, weights = random(5, 3, 80, dtype=dtype), random(5, 3, seed=1).abs()
    bound = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 2e-3}
    torch.testing.assert_close(launch_sum_experts(out, weights), reference_sum_experts(out, weights), **bound)
    x, update, norm = random(5, 80, dtype=dtype, seed=2), random(5, 80, dtype=dtype, seed=3), random(80, dtype=dtype)
    arguments = x, update if adds else None, norm, 1e-6
    got = launch_add_rms_norm(*arguments, experts=ExpertSum(out, weights))
    expected = reference_add_rms_norm(*arguments, experts=ExpertSum(out, weights))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **bound)


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def choices(num_tokens: int, num_experts: int, per_token: int, *, seed: int = 3) -> torch.Tensor:
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(per_token, dim=-1).indices.to(DEVICE)


def weights(
    num_experts: int, hidden: int, features: int, dtype: torch.dtype, *, num_inputs: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """num_inputs: matrices of inputs per expert, 1 without gates."""
    gate_up = random(num_experts, num_inputs * features, hidden, dtype=dtype, seed=1) / hidden**0.5
    return gate_up, random(num_experts, hidden, features, dtype=dtype, seed=2) / features**0.5


def biases(num_experts: int, hidden: int, features: int, dtype: torch.dtype = torch.float32) -> ExpertBiases:
    return ExpertBiases(
        random(num_experts, 2 * features, dtype=dtype, seed=5), random(num_experts, hidden, dtype=dtype, seed=6)
    )


# Experts of gpt-oss; the limit clamps some features.
CLAMPED = GatedActivation("swigluoai", alpha=1.702, limit=1.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token", "hidden", "features", "kind"),
    [
        (1, 4, 2, 32, 64, "clamped"),
        (5, 6, 3, 48, 24, "silu"),
        (40, 3, 2, 64, 72, "gelu"),
        (40, 3, 2, 64, 72, "clamped"),
        (7, 16, 1, 33, 65, "input weights"),
        (5, 6, 3, 48, 24, "relu2"),
        (40, 3, 2, 33, 72, "relu2"),
    ],
)
def test_fused_experts_equal_separate_experts(
    num_tokens: int, num_experts: int, per_token: int, hidden: int, features: int, kind: str, dtype: torch.dtype
) -> None:
    x, chosen = random(num_tokens, hidden, dtype=dtype), choices(num_tokens, num_experts, per_token)
    gate_up, down = weights(num_experts, hidden, features, dtype, num_inputs=1 if kind == "relu2" else 2)
    more: dict[str, Any] = {
        "silu": {},
        "gelu": {"activation": GatedActivation("gelu_pytorch_tanh")},
        "clamped": {"activation": CLAMPED, "biases": biases(num_experts, hidden, features, dtype)},
        "relu2": {"activation": GatedActivation("relu2")},
        "input weights": {"input_weights_TC": random(num_tokens, per_token, seed=7)},
    }[kind]
    expected = reference_fused_experts(x, gate_up, down, chosen, **more)
    got = launch_fused_experts(x, gate_up, down, chosen, **more)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_one_expert_for_all_tokens_and_no_tokens() -> None:
    x, (gate_up, down) = random(70, 32), weights(4, 32, 16, torch.float32)
    chosen = torch.full((70, 1), 2, device=DEVICE)
    expected = reference_fused_experts(x, gate_up, down, chosen)
    torch.testing.assert_close(launch_fused_experts(x, gate_up, down, chosen), expected, atol=1e-4, rtol=1e-4)
    assert launch_fused_experts(x[:0], gate_up, down, chosen[:0]).shape == (0, 1, 32)


@pytest.mark.parametrize("sort", [reference_sort_into_tiles, launch_sort_into_tiles])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "rows"), [(1, 8, 16), (30, 3, 16), (100, 7, 4), (64, 1, 64), (700, 5, 128)]
)
def test_choices_are_sorted_into_tiles_of_their_expert(sort, num_tokens: int, num_experts: int, rows: int) -> None:
    chosen = choices(num_tokens, num_experts, min(2, num_experts))
    choice_P, expert_B = sort(chosen, num_experts=num_experts, rows=rows)
    placed = []
    for tile, expert in zip(choice_P.view(-1, rows).tolist(), expert_B.tolist(), strict=True):
        of_tile = [choice for choice in tile if choice < chosen.numel()] if expert < num_experts else []
        assert all(chosen.flatten()[choice] == expert for choice in of_tile)
        assert of_tile == sorted(of_tile), "choices must be in token order"
        placed += of_tile
    assert sorted(placed) == list(range(chosen.numel()))
    assert expert_B.tolist() == sorted(expert_B.tolist()), "empty tiles must come last"
