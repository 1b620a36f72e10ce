"""Latent attention by torch, the kernels and their references, compared with a naive loop over queries and heads."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from core.model.shape import IndexConfig
from engine.attention import triton_latent_heads
from engine.attention.chosen_positions import IndexedTokens
from engine.attention.latent_heads import Expansion, Rotation, TorchLatentHeads
from engine.attention.triton_latent_heads import KernelLatentHeads, slice_size
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Row
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm
from tests.engine.kernels.launched import launch_kernels
from tests.engine.steps import random
from tests.support.grids import pairs, quick

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 10, 3


def latent_layout(dtype: str, *, num_layers: int, index_dim: int = 0) -> KVLayout:
    sizes = {"num_layers": num_layers, "num_kv_heads": 1, "head_dim": LATENT + ROPE + index_dim, "block_size": 4}
    return KVLayout(model="m", dtype=dtype, num_sides=1, exact_dim=ROPE + index_dim, **sizes)


def naive(q_THD: torch.Tensor, pool: KVPool, rows: list[Row], expansion: Expansion, scale: float) -> torch.Tensor:
    """Compute attention query by query and head by head over expanded keys and values."""
    out, token = torch.empty(len(q_THD), HEADS, VALUE), 0
    for row in rows:
        kept_LD = pool.read(0, torch.tensor(list(row.blocks)), torch.float32)[0, 0]
        for position in range(row.start, row.end):
            seen = kept_LD[: position + 1]
            for head in range(HEADS):
                keys = torch.cat((seen[:, :LATENT] @ expansion.key_HNC[head].T, seen[:, LATENT:]), dim=-1)
                weights = (keys @ q_THD[token, head] * scale).softmax(dim=0)
                out[token, head] = weights @ (seen[:, :LATENT] @ expansion.value_HWC[head].T)
            token += 1
    return out


@pytest.mark.parametrize(
    ("by", "most_keys", "dtype"),
    pairs([("torch", 0), *product(["references", "kernels"], [1000, 10])], ["float32", "fp8_e4m3", "int8"]),
)
def test_mixed_rows_equal_naive_attention(by: str, most_keys: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """most_keys: keys expanded at a time; small values force several slices per row."""
    monkeypatch.setattr(triton_latent_heads, "EXPANDED_BYTES", most_keys * HEADS * (NOPE + VALUE) * 4)
    layout = latent_layout(dtype, num_layers=1)
    pool = KVPool(layout, num_blocks=40, device=CPU)
    pool.write_latents(0, torch.arange(160), random(160, LATENT + ROPE))
    order = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist())
    rows = [
        Row(token_ids=range(n), start=start, blocks=[next(order) for _ in range(-(-(start + n) // 4))], num_logits=1)
        for start, n in [(0, 1), (0, 6), (29, 1), (9, 5), (14, 1)]
    ]
    batch = Batch.of(rows, block_size=4)
    q = random(batch.num_tokens, HEADS, NOPE + ROPE, seed=2)
    expansion = Expansion(random(HEADS, NOPE, LATENT, seed=3) / 5, random(HEADS, VALUE, LATENT, seed=4) / 5)
    angles = torch.zeros(batch.num_tokens, 1, ROPE // 2)
    rotation = Rotation(angles.cos(), angles.sin(), is_interleaved=False)
    if by == "kernels":
        launch_kernels(monkeypatch)
    if by == "torch":
        heads = TorchLatentHeads(batch, pool, rotation, scale=0.3)
    else:
        heads = KernelLatentHeads(DeviceBatch.of(batch, CPU), pool, rotation, scale=0.3)
    # The queries are already rotated.
    got = heads.attend(0, q, expansion)
    torch.testing.assert_close(got, naive(q, pool, rows, expansion, 0.3), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "is_interleaved", "index_dim"),
    quick(
        product(["float32", "fp8_e4m3", "int8"], [False, True], [0, 21]),
        [("float32", True, 0), ("int8", False, 21), ("float32", False, 21)],
    ),
)
def test_kernels_store_the_same_rows_as_torch(
    dtype: str, is_interleaved: bool, index_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = latent_layout(dtype, num_layers=2, index_dim=index_dim)
    row = Row(token_ids=range(9), start=2, blocks=[5, 1, 3], num_logits=1)
    batch = Batch.of([row], block_size=4)
    q, latent, key = random(9, HEADS, NOPE + ROPE), random(9, LATENT, seed=1), random(9, ROPE, seed=2)
    norm = RMSNorm(random(LATENT, seed=3), 1e-6)
    expansion = Expansion(random(HEADS, NOPE, LATENT, seed=3) / 5, random(HEADS, VALUE, LATENT, seed=4) / 5)
    # The interpreter truncates to bf16 instead of rounding, so use rotations whose results are exact in bf16.
    quarter = torch.zeros(9, 1, ROPE // 2), torch.ones(9, 1, ROPE // 2)
    rotation = Rotation(*quarter, is_interleaved=is_interleaved)
    kept = torch.cat((latent, key.bfloat16().float()), dim=-1)
    pools = [KVPool(layout, num_blocks=6, device=CPU) for _ in range(2)]
    indexed = unchosen(9, index_dim)
    plain = TorchLatentHeads(batch, pools[0], rotation, scale=1.0)
    expected = plain.store(1, q, kept, norm=norm, expansion=expansion, indexed=indexed)
    launch_kernels(monkeypatch)
    heads = KernelLatentHeads(DeviceBatch.of(batch, CPU), pools[1], rotation, scale=1.0)
    torch.testing.assert_close(heads.store(1, q, kept, norm=norm, expansion=expansion, indexed=indexed), expected)
    check_kept_alike(pools)


def unchosen(num_tokens: int, index_dim: int) -> IndexedTokens | None:
    """Return an indexer's outputs for contexts that are too short for a choice."""
    if not index_dim:
        return None
    index = IndexConfig(num_heads=2, head_dim=index_dim, top_k=100, is_interleaved=True)
    keys, weights = random(num_tokens, index_dim, seed=8).bfloat16().float(), torch.ones(num_tokens, 2)
    return IndexedTokens(index, random(num_tokens, 2, index_dim), keys, weights)


def check_kept_alike(pools: list[KVPool]) -> None:
    """Compare pools within rounding: a number between two codes may become either."""
    layer, bound = pools[0].layout.num_layers - 1, 0.13 if pools[0].scales else 1e-5
    kept = [pool.read(layer, torch.arange(pool.num_blocks), torch.float32) for pool in pools]
    torch.testing.assert_close(*kept, atol=bound, rtol=bound)
    assert kept[0].any()


def test_slice_size_respects_the_key_limit() -> None:
    assert slice_size([100, 30], most_keys=1000, block_size=16) == 112
    assert slice_size([100, 30], most_keys=100, block_size=16) == 64  # 64 + 30
    assert slice_size([100, 30], most_keys=1, block_size=16) == 16
    for longest in range(1, 200):
        size = slice_size([longest, 7], most_keys=50, block_size=8)
        assert size % 8 == 0 and min(size, longest) + 7 <= 50
