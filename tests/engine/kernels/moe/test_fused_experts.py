"""Fused MoE compared with experts computed one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.kernels.gated_mul import SILU, GatedActivation
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.fused_experts import ExpertBiases, launch_fused_experts
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.support.product_references import reference_fused_experts, reference_sort_into_tiles

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

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


def test_reference_equals_one_mlp_per_choice() -> None:
    x, chosen = random(4, 16), choices(4, 5, 2)
    gate_up, down = weights(5, 16, 8, torch.float32)
    out = reference_fused_experts(x, gate_up, down, chosen)
    for token, choice in [(0, 0), (1, 1), (3, 0)]:
        expert = chosen[token, choice]
        expected = SILU(x[token, None] @ gate_up[expert].T) @ down[expert].T
        torch.testing.assert_close(out[token, choice, None], expected)


def test_reference_equals_gpt_oss_experts() -> None:
    """Experts of gpt-oss feature by feature: biases, limits, and a gate with its own slope."""
    x, chosen, (gate_up, down) = 3 * random(3, 8), choices(3, 4, 2), weights(4, 8, 5, torch.float32)
    of_gate_up, of_down = biases(4, 8, 5)
    out = reference_fused_experts(
        x, gate_up, down, chosen, activation=CLAMPED, biases=ExpertBiases(of_gate_up, of_down)
    )
    for token, choice in [(0, 0), (1, 1), (2, 0)]:
        expert = chosen[token, choice]
        features = gate_up[expert] @ x[token] + of_gate_up[expert]
        expected = of_down[expert].clone()
        for i in range(5):
            gate, up = min(float(features[i]), 1.5), max(-1.5, min(float(features[5 + i]), 1.5))
            expected += down[expert, :, i] * gate / (1 + math.exp(-1.702 * gate)) * (up + 1)
        torch.testing.assert_close(out[token, choice], expected)


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
