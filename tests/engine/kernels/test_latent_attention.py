"""Absorbed latent attention: the kernel computes what the reference does, and that is softmax over the rows."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.fp8 import quantize_rows
from engine.kernels.latent_attention import launch_latent_decode_attention, reference_latent_decode_attention
from tests.engine.kernels.pools import DEVICE, DTYPES, random

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCKS, BLOCK_SIZE = 24, 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["wide", "fp8"])
@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "num_heads", "num_splits"), [(24, 8, 3, 1), (64, 16, 20, 1), (48, 16, 4, 3)]
)
def test_rows_of_any_length(
    latent_dim: int, rope_dim: int, num_heads: int, num_splits: int, is_fp8: bool, dtype: torch.dtype
) -> None:
    pool, scales = random(BLOCKS, 1, 1, BLOCK_SIZE, latent_dim + rope_dim, dtype=dtype, seed=1), None
    if is_fp8:
        pool, scales = quantize_rows(pool, rope_dim)
    contexts = [1, 7, 40, 70]
    q = random(len(contexts), num_heads, latent_dim + rope_dim, dtype=dtype)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
    tables = torch.stack([order.roll(i)[:9] for i in range(len(contexts))]).int().to(DEVICE)
    case = {
        "latent_dim": latent_dim,
        "scale": 0.2,
        "tables_RB": tables,
        "contexts_R": torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        "num_splits": num_splits,
    }
    expected = reference_latent_decode_attention(q, pool, scales, **case)
    got = launch_latent_decode_attention(q, pool, scales, **case)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    first = pool[tables[0, 0].long(), 0, 0, 0]  # the only key of the first row: its latent comes back
    if not is_fp8:
        torch.testing.assert_close(got[0, 0], first[:latent_dim], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
