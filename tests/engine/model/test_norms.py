"""Norms over all heads of queries and keys round where norms over one tensor do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.layers.layers import RMSNorm
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine import gang
from tests.engine.gang import StartGang

TIMEOUT_S = 40.0
TOKENS, Q, K = 50, 48, 24


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=["early", "late"])
def test_projection_norm_rounds_as_rms_norm(weight_dtype: torch.dtype, size: int, start_gang: StartGang) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, Q + 2 * K, generator=generator).bfloat16()
    q_weight, k_weight = (torch.randn(size, generator=generator).bfloat16().to(weight_dtype) for size in (Q, K))
    ranks = start_gang(size, gang.normed_projection, rows, q_weight, k_weight)
    found = zip(*(rank.result(TIMEOUT_S) for rank in ranks), strict=True)
    parts = (RMSNorm(q_weight, 1e-5)(rows[:, :Q]), RMSNorm(k_weight, 1e-5)(rows[:, Q : Q + K]), rows[:, Q + K :])
    for of_ranks, expected in zip(found, parts, strict=True):
        normed = torch.cat(of_ranks, dim=-1)
        assert normed.dtype == torch.bfloat16 and torch.equal(normed, expected)


@pytest.mark.parametrize("adds_one", [False, True])
def test_weights_are_rounded_to_the_models_dtype_first(adds_one: bool, tmp_path: Path) -> None:
    """As when transformers loads float32 files in bfloat16."""
    weight = torch.randn(Q, generator=torch.Generator().manual_seed(0))
    save_file({"norm.weight": weight}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    reader = ShardReader(open_checkpoint(tmp_path), TensorParallel(), torch.bfloat16, torch.device("cpu"))
    norm = reader.norm("norm", 1e-5, adds_one=adds_one, rounds_late=True)
    assert norm.rounds_late and torch.equal(norm.weight, weight.bfloat16().float() + adds_one)
