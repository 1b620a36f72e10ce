"""Models of every family on a GPU, eager and with CUDA graphs, compared with transformers' logits."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from tests.engine.kernels.pools import DEVICE
from tests.engine.model.test_models import FAMILIES
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeModel, reference_logits

# Dense layers only: with rounding a token may choose other experts, which changes its logits.
DENSE = ["llama", "qwen2", "qwen3", "mistral, sliding window", "deepseek_v3, all dense, long queries, halves"]


def errors(tiny_model: MakeModel, family: str, dtype: str) -> list[float]:
    """Return relative errors of three sequences' logits against transformers in fp32.

    Runs prompts beside a later chunk, then one token each, and each sequence alone as in decode steps.
    """
    architecture, changes = FAMILIES[family]
    directory, model = tiny_model(architecture, **changes)
    config = EngineConfig(
        model_dir=directory, dtype=dtype, block_size=8, num_blocks=96, device=str(DEVICE), recorded_rows=4
    )
    runner, sequences = ModelRunner(config), prompts(30, 9, 17)
    expected = [reference_logits(model, sequence) for sequence in sequences]
    step(runner, sequences, [(0, 0, 5)])
    found: list[float] = []
    for at, spans in (
        (-2, [(i, 5 if i == 0 else 0, len(s) - 1) for i, s in enumerate(sequences)]),
        (-1, [(i, len(s) - 1, len(s)) for i, s in enumerate(sequences)]),
    ):
        for row, of_sequence in zip(step(runner, sequences, spans).cpu(), expected, strict=True):
            found.append(float((row - of_sequence[at]).norm() / of_sequence[at].norm()))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str, tiny_model: MakeModel) -> None:
    assert max(errors(tiny_model, family, "float32")) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("family", DENSE)
def test_logits_in_bf16(family: str, tiny_model: MakeModel) -> None:
    assert max(errors(tiny_model, family, "bfloat16")) < 0.15
