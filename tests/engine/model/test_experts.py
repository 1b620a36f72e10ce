"""Experts split over ranks or placed on them: logits and tokens equal those of a single rank."""

from __future__ import annotations

import pytest
import torch

from core.model.config import load
from core.types.errors import SpecError
from tests.engine import gang
from tests.engine.gang import StartGang
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA4_MOE,
    GLM_MOE_DSA,
    GPT_OSS,
    LLAMA4,
    NEMOTRON_H_MOE,
    MakeModel,
    MakeRunner,
    reference_logits,
)

TIMEOUT_S = 50.0
QWEN2_MOE = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "num_experts": 6}
MIXTRAL = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}


@pytest.mark.parametrize(
    ("size", "family", "changes", "expert_parallel"),
    [
        (2, "mixtral", MIXTRAL, False),
        (2, "qwen3_moe", QWEN3_MOE, True),
        (2, "qwen2_moe", QWEN2_MOE, False),
        (2, "deepseek_v3", DEEPSEEK_V3, True),
        # Ranks with 1 and with 2 experts; steps with fewer tokens than ranks.
        (4, "mixtral", MIXTRAL, True),
        (4, "gpt_oss", GPT_OSS, True),
        (2, "llama4", LLAMA4, True),  # weighs the experts' inputs
        (2, "gemma4", GEMMA4_MOE, True),
        *((2, "nemotron_h", NEMOTRON_H_MOE | {"moe_latent_size": 36}, spreads) for spreads in (False, True)),
    ],
)
def test_logits_do_not_depend_on_expert_placement(
    size: int, family: str, changes: dict, expert_parallel: bool, tiny_model: MakeModel, start_gang: StartGang
) -> None:
    directory, model = tiny_model(family, **changes)
    sequences = prompts(30, 9, 17)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    ranks = start_gang(size, gang.logits_in_three_steps, directory, sequences, "float32", expert_parallel)
    results = [rank.result(TIMEOUT_S) for rank in ranks]
    for _, prompt_logits, token_logits in results:
        torch.testing.assert_close(prompt_logits, torch.stack([e[-2] for e in expected]), atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(token_logits, torch.stack([e[-1] for e in expected]), atol=2e-4, rtol=1e-4)
        assert torch.equal(token_logits, results[0][2])


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
