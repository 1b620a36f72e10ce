"""Attention kernels against attention written out in fp32: ragged rows, grouped heads, windows, pools of 8 bits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from engine.kernels.decode_attention import launch_decode_attention, reference_decode_attention
from engine.kernels.prefill_attention import QueryTiles, launch_prefill_attention, reference_prefill_attention
from tests.engine.kernels.pools import DEVICE, DTYPES, EIGHT_BITS, random, random_pool

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# query heads, kv heads, head_dim, block size, window, the pool's 8 bits, dtype
CASES = [
    (2, 2, 64, 16, None, None, torch.float16),
    (3, 1, 64, 16, None, "fp8", torch.float16),  # SmolLM2's groups
    (3, 1, 64, 16, None, "int8", torch.float16),
    (4, 2, 80, 8, None, None, torch.float32),
    (2, 1, 64, 16, 70, None, torch.float32),
    (2, 1, 32, 8, 7, "fp8", torch.float32),
    (2, 1, 32, 8, 7, "int8", torch.float32),
    *((32, 8, 128, 16, None, kind, torch.bfloat16) for kind in (None, *EIGHT_BITS) if torch.bfloat16 in DTYPES),
]


def tables_for(contexts: list[int], block_size: int) -> torch.Tensor:
    """Blocks in no order, none shared; what stands behind a row's last one is not a block."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).split(counts)
    tables = torch.full((len(contexts), max(counts) + 2), 1 << 30, dtype=torch.int32)
    for table, ids in zip(tables, order, strict=True):
        table[: len(ids)] = ids
    return tables.to(DEVICE)


@pytest.mark.parametrize(("case", "num_splits"), [*product(CASES, [1, 3]), (CASES[0], 20)], ids=str)
def test_decode(case: tuple, num_splits: int) -> None:
    num_heads, num_kv_heads, dim, block_size, window, kind, dtype = case
    contexts = [1, 130, 65]
    tables = tables_for(contexts, block_size)
    codes, scales = random_pool(40, num_kv_heads, block_size, dim, dtype=EIGHT_BITS.get(kind, dtype))
    q = random(8, num_heads, dim, dtype=dtype)
    outs = [torch.full_like(q, 7.0) for _ in range(2)]
    for attend, out in zip((launch_decode_attention, reference_decode_attention), outs, strict=True):
        attend(
            q,
            codes,
            scales,
            tokens_R=torch.tensor([6, 0, 2], device=DEVICE),
            tables_RB=tables,
            contexts_R=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            window=window,
            num_splits=num_splits,
            out_THD=out,
        )
    tolerance = TOLERANCE[dtype] * (3 if kind else 1)  # values are three times as large there
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)
    assert (outs[0][[1, 3, 4, 5, 7]] == 7.0).all(), "tokens of other rows were written"


def test_a_row_without_keys_gets_zeros() -> None:
    """It fills up the batch of a captured graph."""
    codes, _ = random_pool(2, 2, 8, 64, dtype=torch.float32)
    q = random(2, 4, 64)
    out = torch.full_like(q, 7.0)
    launch_decode_attention(
        q,
        codes,
        None,
        tokens_R=torch.tensor([0, 1], device=DEVICE),
        tables_RB=torch.zeros(2, 1, dtype=torch.int32, device=DEVICE),
        contexts_R=torch.tensor([0, 5], dtype=torch.int32, device=DEVICE),
        window=None,
        num_splits=2,
        out_THD=out,
    )
    assert not out[0].any() and out[1].all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case: tuple) -> None:
    num_heads, num_kv_heads, dim, block_size, window, kind, dtype = case
    contexts, lengths = [135, 70, 3], [135, 40, 2]  # a whole prompt of two tiles, and chunks behind a prefix
    begins = np.array([1, 136, 178])  # tokens 0, 176 and 177 belong to other rows
    tables = tables_for(contexts, block_size)
    codes, scales = random_pool(40, num_kv_heads, block_size, dim, dtype=EIGHT_BITS.get(kind, dtype))
    q = random(180, num_heads, dim, dtype=dtype)
    outs = [torch.full_like(q, 7.0) for _ in range(2)]
    for attend, out in zip((launch_prefill_attention, reference_prefill_attention), outs, strict=True):
        attend(
            q,
            codes,
            scales,
            tiles=QueryTiles.of(begins, np.array(lengths), np.array(contexts), DEVICE),
            tables_RB=tables,
            contexts_R=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            window=window,
            out_THD=out,
        )
    tolerance = TOLERANCE[dtype] * (3 if kind else 1)
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)
    assert (outs[0][[0, 176, 177]] == 7.0).all(), "tokens of other rows were written"
