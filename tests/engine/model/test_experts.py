"""Experts: banks, placement on ranks, and tokens that equal those of a single rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.model.config import load
from core.types.errors import SpecError
from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.fused_experts import ExpertBiases
from engine.layers.layers import Linear, TorchMatrix
from engine.model.expert_bank import Expert, ExpertList, ExpertSlots, ExpertStack
from engine.model.expert_parallel import busiest, plan_experts
from tests.engine import gang
from tests.engine.gang import StartGang
from tests.engine.runner.test_parallel import MIXTRAL, QWEN3_MOE
from tests.engine.steps import prompts, random, step
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3, GLM_MOE_DSA, MakeModel, MakeRunner

TIMEOUT_S = 50.0


def test_expert_parallel_tokens_equal_single_rank(tiny_model: MakeModel, start_gang: StartGang) -> None:
    directory, _ = tiny_model("qwen3_moe", **QWEN3_MOE)
    token_ids = prompts(13, 1, 22)
    split = start_gang(2, gang.tokens, directory, token_ids, False)
    alone = [rank.result(TIMEOUT_S) for rank in start_gang(1, gang.tokens, directory, token_ids, True)]
    spread = start_gang(2, gang.tokens, directory, token_ids, True)
    assert [rank.result(TIMEOUT_S) for rank in (*split, *spread)] == alone * 4


def test_moving_expert_copies_do_not_change_tokens(tiny_model: MakeModel, start_gang: StartGang) -> None:
    """Experts are placed again about every third step, by the choices so far."""
    directory, _ = tiny_model("deepseek_v3", **DEEPSEEK_V3)
    token_ids = prompts(13, 1, 22)
    alone = [rank.result(TIMEOUT_S) for rank in start_gang(1, gang.tokens, directory, token_ids, False)]
    spread = start_gang(4, gang.tokens, directory, token_ids, True, 4, 3)
    assert [rank.result(TIMEOUT_S) for rank in spread] == alone * 4


def test_popular_expert_is_copied_to_every_rank(start_gang: StartGang) -> None:
    """Four experts, two redundant places: all tokens choose the last expert; after three steps both ranks hold it."""
    results = [rank.result(TIMEOUT_S) for rank in start_gang(2, gang.experts_that_move, 4, 2, 3)]
    for banks, outputs in results:
        assert len(banks) == 2 and 3 in banks[1]
        assert outputs == [[3.0] * 5] * 4, "any rank must give the same result"
    assert [3 in banks[0] for banks, _ in results].count(True) == 1


def test_all_to_all_with_any_sizes(start_gang: StartGang) -> None:
    counts = [[1, 0, 5], [0, 0, 0], [2, 7, 1]]
    ranks = start_gang(3, gang.all_to_all, counts)
    for rank, result in enumerate(ranks):
        expected = [[other, rank, i] for other in range(3) for i in range(counts[other][rank])]
        assert result.result(TIMEOUT_S).tolist() == expected


def test_token_does_not_depend_on_other_tokens(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Includes a token whose experts no other token chooses."""
    directory, _ = tiny_model("mixtral", **MIXTRAL)
    sequences = prompts(20, 7)
    both = step(make_runner(directory), sequences, [(0, 0, 20), (1, 0, 7)])
    alone = step(make_runner(directory), sequences, [(1, 0, 7)])
    torch.testing.assert_close(both[1], alone[0], atol=1e-5, rtol=1e-5)


def test_invalid_expert_parallelism_is_rejected(tiny_model: MakeModel) -> None:
    dense, _ = tiny_model("llama")
    with pytest.raises(SpecError, match="expert_parallel: LlamaForCausalLM has no experts"):
        load(dense).check_expert_parallel(2)
    sparse, model = tiny_model("mixtral", **MIXTRAL)
    with pytest.raises(SpecError, match="5 experts do not fill 6 ranks"):
        load(sparse).check_expert_parallel(6)
    with pytest.raises(SpecError, match="redundant_experts: 6 are more than the 5 that 2 ranks do not hold"):
        load(sparse).check_expert_parallel(2, redundant=6)
    # The difference is the routers' parameters.
    assert load(sparse).num_parameters == sum(p.numel() for p in model.parameters()) - 3 * 5 * 48
    for family, changes, num_sparse in (
        ("deepseek_v2", DEEPSEEK_V2, 2),
        ("deepseek_v3", DEEPSEEK_V3, 2),
        ("glm_moe_dsa", GLM_MOE_DSA, 4),
    ):
        directory, model = tiny_model(family, **changes)
        assert load(directory).num_parameters == sum(p.numel() for p in model.parameters()) - num_sparse * 8 * 48


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


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    counts = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=24))
    ranks = draw(st.integers(1, len(counts)))
    return counts, ranks, draw(st.integers(0, min(16, (ranks - 1) * len(counts))))


@given(cases())
def test_every_place_is_taken_and_no_rank_holds_an_expert_twice(case: tuple[list[int], int, int]) -> None:
    counts, ranks, redundant = case
    placement = plan_experts(counts, ranks=ranks, redundant=redundant)
    held = sorted(expert for experts in placement for expert in experts)
    assert set(held) == set(range(len(counts))) and len(held) == len(counts) + redundant
    assert all(len(set(experts)) == len(experts) for experts in placement)
    sizes = [len(experts) for experts in placement]
    assert max(sizes) - min(sizes) <= 1
    assert placement == plan_experts(counts, ranks=ranks, redundant=redundant), (
        "every rank must compute the same placement"
    )


@pytest.mark.parametrize(
    ("counts", "ranks", "redundant", "bound"),
    [
        ([100, 1, 1, 1, 1, 1, 1, 1], 2, 2, 1.1),  # one expert has nearly all the load: both ranks hold it
        ([50, 40, 30, 20, 10, 5, 3, 2], 4, 4, 1.15),
        ([90, 80, 1, 1], 2, 0, 1.1),  # without copies, the two busy experts are on different ranks
        ([0, 0, 0, 0], 2, 2, 1.0),
    ],
)
def test_the_busiest_rank_has_little_more_than_its_share(
    counts: list[int], ranks: int, redundant: int, bound: float
) -> None:
    assert busiest(plan_experts(counts, ranks=ranks, redundant=redundant), counts) <= bound


def test_equal_counts_give_equal_sizes() -> None:
    assert [len(experts) for experts in plan_experts([1] * 8, ranks=4)] == [2, 2, 2, 2]
