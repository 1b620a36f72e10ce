"""Banks of experts: one by one equals all at once, and no expert is read twice."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.fused_experts import ExpertBiases
from engine.layers.layers import Linear, TorchMatrix
from engine.model.expert_bank import Expert, ExpertList, ExpertSlots, ExpertStack


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_more", [False, True])
def test_expert_list_equals_expert_stack(has_more: bool) -> None:
    more = (ExpertBiases(random(5, 12), random(5, 8)), GatedActivation("swigluoai")) if has_more else ()
    stack = ExpertStack(random(5, 12, 8), random(5, 8, 6, seed=1), *more)
    # Expert 3 is never chosen.
    x, chosen = random(7, 8, seed=2), torch.tensor([[0, 4], [4, 0], [1, 2], [0, 1], [2, 4], [1, 0], [4, 2]])
    torch.testing.assert_close(ExpertList(stack.experts())(x, chosen), stack(x, chosen))
    if not has_more:
        weights = random(7, 2, seed=3)
        expected = torch.stack([stack(x * weights[:, c, None], chosen[:, c, None])[:, 0] for c in range(2)], dim=1)
        for bank in (stack, ExpertList(stack.experts())):
            torch.testing.assert_close(bank(x, chosen, input_weights_TC=weights), expected)
    for bank in (stack, ExpertList(stack.experts())):
        assert bank(x[:0], chosen[:0]).shape == (0, 2, 8)


def test_only_new_experts_are_read() -> None:
    read: list[int] = []

    def make(index: int) -> Expert:
        read.append(index)
        gate_up, down = torch.full((2, 1), 1.0), torch.full((1, 1), float(index))
        return Expert(Linear(TorchMatrix(gate_up)), TorchMatrix(down))

    shelf, x = ExpertSlots(make), torch.ones(1, 1)
    first = shelf([3, 1])(x, torch.tensor([[0, 1]]))
    second = shelf([1, 2, 3])(x, torch.tensor([[0, 1, 2]]))
    assert read == [3, 1, 2]
    torch.testing.assert_close(second[0, :, 0], first[0, 1, 0] * torch.tensor([1.0, 2.0, 3.0]))
