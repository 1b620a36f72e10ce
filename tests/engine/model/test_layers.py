"""Norms over all heads round like norms over one tensor; states of recurrent layers: bytes, and what ranks share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.types.errors import SpecError
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


QWEN3_NEXT = DeltaNetShape(
    hidden_size=2048,
    num_key_heads=16,
    num_value_heads=32,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    norm_eps=1e-6,
    is_fused=True,
)
MAMBA = MambaShape(
    hidden_size=40,
    num_heads=8,
    head_dim=16,
    num_groups=2,
    state_dim=24,
    conv_width=3,
    norm_eps=1e-5,
    min_dt=0.001,
    has_bias=True,
    has_conv_bias=True,
)


@pytest.mark.parametrize("shape", [QWEN3_NEXT, MAMBA, ShortConvShape(hidden_size=40, conv_width=3, has_bias=True)])
def test_heads_that_cannot_be_shared_are_refused(shape: RecurrentShape) -> None:
    with pytest.raises(SpecError, match="ranks cannot share"):
        shape.check_ranks(3)


def test_bytes_of_states() -> None:
    """Qwen3-Next: 2 MiB of matrices and 48 KiB of bf16 rows per layer, by four ranks a quarter each."""
    for num_ranks, matrix_bytes, conv_bytes in ((1, 2 << 20, 48 << 10), (4, 512 << 10, 12 << 10)):
        assert QWEN3_NEXT.matrix_bytes(num_ranks) == matrix_bytes
        assert QWEN3_NEXT.state_bytes(num_ranks, number_bytes=2) == matrix_bytes + conv_bytes
