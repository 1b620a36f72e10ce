"""MoE models with all layers on the GPU kernels, in the interpreter, compared with transformers.

Patches in the parts that only a GPU uses: banks computed at once that include the shared experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.model import experts
from engine.model.expert_bank import Expert, ExpertStack
from engine.model.experts import SharedExpert
from engine.runner.runner import ModelRunner
from tests.engine.kernels.launched import launch_kernels
from tests.engine.kernels.pools import DEVICE
from tests.engine.model.test_models import FAMILIES as EVERY_FAMILY
from tests.engine.steps import as_on_gpu, prompts
from tests.engine.tiny_models import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, NEMOTRON_H_MOE, MakeModel, reference_logits
from tests.support.grids import quick

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="test_whole_models.py covers GPUs")

QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
QWEN2_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE | {"shared_expert_intermediate_size": 48},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "nemotron_h": NEMOTRON_H_MOE | {"moe_shared_expert_intermediate_size": 40},
}
BLOCK_SIZE, BLOCKS_OF_ROW = 8, 5


@pytest.mark.parametrize("family", quick(FAMILIES, ("deepseek_v3",)))
def test_tokens_equal_transformers(family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, model = tiny_model(family, **FAMILIES[family], num_hidden_layers=2)
    runner = with_all_kernels(directory, monkeypatch)
    sequences = prompts(30, 9, 17)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    computed = logits_of(runner, sequences, [(0, len(sequence) - 3) for sequence in sequences])
    # After a step of prompts, steps of one token each.
    for back in (2, 1):
        check(computed, [of_sequence[-1 - back - 1] for of_sequence in expected])
        ends = [len(sequence) - back for sequence in sequences]
        computed = logits_of(runner, sequences, [(end - 1, end) for end in ends])
    check(computed, [of_sequence[-2] for of_sequence in expected])


@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "gemma4", "gemma4, experts", "gpt_oss", "minimax_m2", "llama4", "mistral4", "granite_moe"),
        *("deepseek_v32", "deepseek_v32, yarn, wide choice", "glm_moe_dsa", "nemotron_h, latents"),
    ],
)
def test_the_kernels_references_equal_transformers(family: str, tiny_model: MakeModel) -> None:
    """Steps of a GPU on a CPU: everything but the kernels themselves."""
    architecture, changes = EVERY_FAMILY[family]
    directory, model = tiny_model(architecture, **changes)
    runner = ModelRunner(EngineConfig(model_dir=directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=15))
    sequences = prompts(30, 9, 17)
    for back in (1, 0):
        ends = [len(sequence) - back for sequence in sequences]
        computed = logits_of(runner, sequences, [(0 if back else end - 1, end) for end in ends])
        check(computed, [reference_logits(model, of[:end])[-1] for of, end in zip(sequences, ends, strict=True)])


def with_all_kernels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    def stack(of: list[Expert]) -> ExpertStack:
        return ExpertStack(
            torch.stack([expert.gate_up.matrix.weight_OI for expert in of]),
            torch.stack([expert.down.weight_OI for expert in of]),
            activation=of[0].activation,
        )

    monkeypatch.setattr(ExpertStack, "of", stack)
    # Shared experts must be in the bank.
    monkeypatch.setattr(SharedExpert, "read", None)
    monkeypatch.setattr(experts, "pieces_of_shared", lambda reader, shape: shape.shared_size // shape.intermediate_size)
    launch_kernels(monkeypatch)
    return ModelRunner(EngineConfig(model_dir=directory, dtype="float32", block_size=BLOCK_SIZE, num_blocks=15))


def logits_of(runner: ModelRunner, sequences: list[list[int]], spans: list[tuple[int, int]]) -> torch.Tensor:
    """Return the logits of the last token of each span."""
    rows = [
        Row(
            token_ids=sequence[start:end],
            start=start,
            blocks=list(range(i * BLOCKS_OF_ROW, (i + 1) * BLOCKS_OF_ROW)),
            num_logits=1,
            state_index=i,
        )
        for i, (sequence, (start, end)) in enumerate(zip(sequences, spans, strict=True))
    ]
    return as_on_gpu(runner, Batch.of(rows, block_size=BLOCK_SIZE))


def check(computed: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(computed, torch.stack(expected), atol=2e-4, rtol=1e-4)
    assert computed.argmax(dim=-1).tolist() == [row.argmax().item() for row in expected]
