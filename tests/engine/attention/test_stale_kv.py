"""Stale KV in a reused block does not affect the sequence that gets the block next."""

from __future__ import annotations

import pytest
import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from tests.engine.steps import prompts
from tests.engine.tiny_models import DEEPSEEK_V32, MakeModel, MakeRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "mistral", "deepseek_v3", "deepseek_v32"])
def test_nan_after_the_last_key_is_ignored(
    model: str, dtype: str, tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    """NaN left by a failed request or a peer. Covers prompts, decode rows and rows of different lengths."""
    changes = DEEPSEEK_V32 if model == "deepseek_v32" else {}
    runner = make_runner(tiny_model(model, **changes)[0], dtype=dtype, num_blocks=12)
    long, short = prompts(29, 9)
    steps = [
        [Row(long[:20], 0, [0, 1, 2, 3], num_logits=1), Row(short[:5], 0, [4, 5], num_logits=1)],
        [Row(long[20:28], 20, [0, 1, 2, 3], num_logits=1), Row(short[5:8], 5, [4, 5], num_logits=1)],
        [Row(long[28:], 28, [0, 1, 2, 3], num_logits=1), Row(short[8:], 8, [4, 5], num_logits=1)],
    ]
    found: list[list[torch.Tensor]] = []
    for left in (0.0, torch.nan):
        for codes in runner.pool.codes:
            codes.fill_(left)
        found.append([runner.forward(Batch.of(rows, block_size=8)).clone() for rows in steps])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)
