"""Attention backends of a step: kernels and their references equal torch."""

from __future__ import annotations

import pytest
import torch

from engine.attention import triton_heads
from engine.attention.heads import Heads, TorchHeads
from engine.attention.layer_attention import LayerAttention
from engine.attention.triton_heads import KernelHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Row
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import RMSNorm
from tests.engine.kernels.launched import launch_kernels
from tests.engine.kernels.pools import DEVICE, random

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.mark.parametrize(("window", "has_norms"), [(None, True), (9, False)])
@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3", "int8", "int4"])
@pytest.mark.parametrize(
    ("is_launched", "is_gathered", "most_queries"),
    [(False, False, 1), (True, False, 1), (True, True, 1), (True, False, 4)],
)
def test_mixed_step_equals_torch(
    dtype: str,
    window: int | None,
    has_norms: bool,
    is_launched: bool,
    is_gathered: bool,
    most_queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two prompts, one of them a chunk as short as a few query groups, with two single tokens between them."""
    for name in ("MIN_QUERIES", "MIN_QUERIES_OF_CODES") if is_gathered else ():
        monkeypatch.setattr(triton_heads, name, 1)
    layout = KVLayout(model="m", num_layers=2, num_kv_heads=(4, 2), head_dim=(16, 32), block_size=8, dtype=dtype)
    spans = [(0, 19, [3, 1, 7]), (12, 13, [5, 0]), (8, 20, [2, 4, 6]), (0, 1, [8])]
    rows = [Row(token_ids=[0] * (end - start), start=start, blocks=b, num_logits=1) for start, end, b in spans]
    batch = Batch.of(rows, block_size=8)
    fused = random(batch.num_tokens, 4 + 2 * 2, 32)
    angles = random(batch.num_tokens, 1, 16, seed=4)
    norms = (RMSNorm(random(32), 1e-5), RMSNorm(random(32, seed=8), 1e-5)) if has_norms else (None, None)
    attention = LayerAttention(layer=1, scale=32**-0.5, window=window, q_norm=norms[0], k_norm=norms[1])

    def attended(heads: Heads) -> torch.Tensor:
        return heads.attend(attention, heads.store(attention, fused.clone()))

    pools = [KVPool(layout, num_blocks=9, device=DEVICE) for _ in range(2)]
    for pool in pools:
        pool.write(1, torch.arange(72, device=DEVICE), *random(2, 72, 2, 32, seed=6))
    expected = attended(TorchHeads(batch, pools[0], [(angles.cos(), angles.sin())]))
    if is_launched:
        launch_kernels(monkeypatch)
    on_device = DeviceBatch.of(batch, DEVICE, most_queries=most_queries)
    assert on_device.prompts and on_device.prompts.query_lens == ([19, 12] if most_queries == 1 else [19])
    assert triton_heads.is_worth_gathering(on_device.prompts, pools[1], fused.dtype) == is_gathered
    got = attended(KernelHeads(on_device, pools[1], [(angles.cos(), angles.sin())]))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_few_queries_over_many_keys_do_not_gather() -> None:
    """Prompts whose keys exceed the gather limit do not gather either."""
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=32, block_size=8, dtype="float32")
    pool = KVPool(layout, num_blocks=700, device=DEVICE)
    blocks = iter(range(700))

    def is_gathered(*spans: tuple[int, int]) -> bool:
        """spans: (start, new tokens) of each row."""
        rows = [
            Row(
                token_ids=[0] * new, start=old, blocks=[next(blocks) for _ in range((old + new + 7) // 8)], num_logits=1
            )
            for old, new in spans
        ]
        batch = DeviceBatch.of(Batch.of(rows, block_size=8), DEVICE)
        return triton_heads.is_worth_gathering(batch.prompts, pool, torch.float32)

    assert is_gathered((0, 300)) and not is_gathered((0, 200))
    assert not is_gathered((0, 300), (2000, 8)) and is_gathered((0, 600), (100, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_heads, "MOST_GATHERED_BYTES", 300 * 2 * 2 * 32 * 4 - 1)
        assert not is_gathered((0, 300))
