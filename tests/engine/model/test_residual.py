"""Deferred additions to the residual stream equal immediate ones, with kernels and torch, dense layers and experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.moe.expert_router import new_counters
from engine.kernels.moe.expert_sum import ExpertSum
from engine.kernels.moe.top_k import ChoiceRule
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, TorchMatrix
from engine.layers.residual import Residual
from engine.model.expert_bank import ExpertStack
from engine.model.experts import Routing, SharedExpert, SparseMLP, SplitExperts
from engine.model.gated_mlp import GatedMLP
from engine.runner.parallel import TensorParallel
from tests.engine.kernels.launched import launch_kernels

CPU = torch.device("cpu")
TOKENS, HIDDEN, FEATURES, EXPERTS = 5, 24, 16, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def matrix(outputs: int, inputs: int, seed: int) -> TorchMatrix:
    return TorchMatrix(random(outputs, inputs, seed=seed))


def dense(output_norm: RMSNorm | None = None) -> GatedMLP:
    down = RowParallelLinear(matrix(HIDDEN, FEATURES, 2), None, TensorParallel())
    return GatedMLP(Linear(matrix(2 * FEATURES, HIDDEN, 1)), down, output_norm=output_norm)


def sparse(*, has_shared: bool, scale: float = 1.0) -> SparseMLP:
    rule = ChoiceRule(
        num_choices=2, num_groups=3, num_groups_per_token=2, scores="sigmoid", normalizes_weights=True, weight_scale=1.5
    )
    routing = Routing(random(EXPERTS, HIDDEN, seed=3) * 5, random(EXPERTS, seed=4), new_counters(CPU), True, rule)
    bank = ExpertStack(random(EXPERTS, 2 * FEATURES, HIDDEN, seed=5), random(EXPERTS, HIDDEN, FEATURES, seed=6))
    shared = SharedExpert(dense().gate_up, dense().down, None) if has_shared else None
    return SparseMLP(routing, SplitExperts(bank, TensorParallel()), shared, residual_scale=scale)


@pytest.mark.parametrize("by", ["references", "kernels"])
@pytest.mark.parametrize(
    "layers",
    [
        [dense(), dense()],
        [dense(RMSNorm(random(HIDDEN, seed=7) + 1, 1e-6)), dense()],
        [sparse(has_shared=False), sparse(has_shared=True), dense()],
        [sparse(has_shared=True), sparse(has_shared=False)],
        [sparse(has_shared=True, scale=0.3), sparse(has_shared=False, scale=0.3), dense()],
    ],
)
def test_deferred_layers_equal_immediate_layers(
    layers: list[GatedMLP | SparseMLP], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TE, norm = random(TOKENS, HIDDEN, seed=9) * 5, RMSNorm(random(HIDDEN, seed=8) + 1, 1e-6)
    at_once, late = (Residual(x_TE, adds_late=adds_late) for adds_late in (False, True))
    for layer in layers:
        layer(at_once, norm=norm)
    if by == "kernels":
        launch_kernels(monkeypatch)
    for layer in layers:
        layer(late, norm=norm)
    torch.testing.assert_close(late.total(), at_once.total(), atol=1e-5, rtol=1e-5)


def test_several_additions_before_one_norm() -> None:
    """Two expert sums and two updates, in order."""
    x_TE, norm = random(TOKENS, HIDDEN), RMSNorm(torch.ones(HIDDEN), 1e-6)
    experts = [ExpertSum(random(TOKENS, 2, HIDDEN, seed=i), random(TOKENS, 2, seed=i).abs()) for i in (1, 2)]
    updates: list[Tensor | ExpertSum] = [*experts, random(TOKENS, HIDDEN, seed=3), random(TOKENS, HIDDEN, seed=4)]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [2, 3], [0]):
        at_once, late = (Residual(x_TE, adds_late=adds_late) for adds_late in (False, True))
        for residual in (at_once, late):
            for i in order:
                residual.add(updates[i])
        assert torch.equal(late.normed(norm), at_once.normed(norm))
        assert torch.equal(late.total(), at_once.total())
