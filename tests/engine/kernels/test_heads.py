"""A step's heads by the kernels, or by their references, are those that torch computes."""

from __future__ import annotations

import pytest
import torch

from engine.attention.heads import Heads, TorchHeads
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

WINDOWS = [None, 9]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_mixed_step(
    dtype: str, window: int | None, has_norms: bool, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, of which one is a later chunk, and two single tokens between them."""
    layout = KVLayout(model="m", num_layers=2, num_kv_heads=2, head_dim=32, block_size=8, dtype=dtype)
    spans = [(0, 19, [3, 1, 7]), (12, 13, [5, 0]), (8, 20, [2, 4, 6]), (0, 1, [8])]
    rows = [Row(token_ids=[0] * (end - start), start=start, blocks=b, num_logits=1) for start, end, b in spans]
    batch = Batch.of(rows, block_size=8)
    fused = random(batch.num_tokens, 4 + 2 * 2, 32)
    angles = random(batch.num_tokens, 1, 16, seed=4)
    norms = {"q_norm": RMSNorm(random(32), 1e-5), "k_norm": RMSNorm(random(32, seed=8), 1e-5)} if has_norms else {}

    def attended(heads: Heads) -> torch.Tensor:
        q_THD = heads.store(1, fused.clone(), **({"q_norm": None, "k_norm": None} | norms))
        return heads.attend(1, q_THD, window=window)

    pools = [KVPool(layout, num_blocks=9, device=DEVICE) for _ in range(2)]
    for pool in pools:
        pool.write(1, torch.arange(72, device=DEVICE), *random(2, 72, 2, 32, seed=6))
    expected = attended(TorchHeads(batch, pools[0], angles.cos(), angles.sin(), WINDOWS))
    if is_launched:
        launch_kernels(monkeypatch)
    got = attended(KernelHeads(DeviceBatch.of(batch, DEVICE), pools[1], angles.cos(), angles.sin()))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
