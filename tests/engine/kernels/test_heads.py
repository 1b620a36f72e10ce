"""Attention backends of a step: kernels and their references equal torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

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
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


# Changes of the layer's attention, norms of queries, keys and values, rotated features of 32.
LAYERS = [
    ({}, (True, True, False), 32),
    ({"window": 9}, (False, False, False), 32),
    ({"chunk": 10, "soft_cap": 2.0, "scale": 0.4}, (True, False, False), 12),
    ({"sinks_H": random(4, seed=9), "soft_cap": 3.0}, (True, True, True), 0),
]


STORED = [
    *((layer, dtype) for layer in (0, 3) for dtype in ("float32", "int4")),
    *((layer, dtype) for layer in (1, 2) for dtype in ("fp8_e4m3", "int8")),
]
# Whether kernels are launched and keys gathered, and queries per group.
STEPS = [(False, False, 1), (True, False, 1), (True, True, 1), (True, False, 4)]
# Other formats and layers are launched in test_attention.py.
LAUNCHED = [(1, "fp8_e4m3", *STEPS[2]), (2, "int8", *STEPS[3])]


@pytest.mark.parametrize(
    ("layer", "dtype", "is_launched", "is_gathered", "most_queries"),
    quick(
        [(*stored, *how) for stored, how in product(STORED, STEPS)],
        [*((*stored, *STEPS[0]) for stored in STORED), *LAUNCHED],
    ),
)
def test_mixed_step_equals_torch(
    layer: int, dtype: str, is_launched: bool, is_gathered: bool, most_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, one of them a chunk as short as a few query groups, with two single tokens between them."""
    for name in ("MIN_QUERIES", "MIN_QUERIES_OF_CODES") if is_gathered else ():
        monkeypatch.setattr(triton_heads, name, 1)
    layout = KVLayout(model="m", num_layers=2, num_kv_heads=(4, 2), head_dim=(16, 32), block_size=8, dtype=dtype)
    spans = [(0, 19, [3, 1, 7]), (12, 13, [5, 0]), (8, 20, [2, 4, 6]), (0, 1, [8])]
    rows = [Row(token_ids=[0] * (end - start), start=start, blocks=b, num_logits=1) for start, end, b in spans]
    batch = Batch.of(rows, block_size=8)
    fused = random(batch.num_tokens, 4 + 2 * 2, 32)
    changes, has_norms, rotated = LAYERS[layer]
    # The layer uses the second kind of rotation.
    angles = [random(batch.num_tokens, 1, half, seed=4) for half in (16, rotated // 2)]
    rotations = [(angle.cos(), angle.sin()) for angle in angles]
    norms = {
        f"{head}_norm": RMSNorm(random(32, seed=i), 1e-5) if has_norm else None
        for i, (head, has_norm) in enumerate(zip("qkv", has_norms, strict=True))
    }
    attention = LayerAttention(layer=1, rope=1, **{"scale": 32**-0.5} | changes, **norms)
    reader = replace(attention, stores=False, k_norm=None, v_norm=None)

    def attended(heads: Heads) -> torch.Tensor:
        """Attend in a layer that stores keys, and in one that computes only queries."""
        q = heads.store(attention, fused.clone())
        again = heads.store(reader, fused[:, :4].clone())
        return torch.cat((heads.attend(attention, q), heads.attend(reader, 2 * again)))

    pools = [KVPool(layout, num_blocks=9, device=DEVICE) for _ in range(2)]
    for pool in pools:
        pool.write(1, torch.arange(72, device=DEVICE), *random(2, 72, 2, 32, seed=6))
    expected = attended(TorchHeads(batch, pools[0], rotations))
    if is_launched:
        launch_kernels(monkeypatch)
    on_device = DeviceBatch.of(batch, DEVICE, most_queries=most_queries)
    assert on_device.prompts and on_device.prompts.query_lens == ([19, 12] if most_queries == 1 else [19])
    assert triton_heads.is_worth_gathering(on_device.prompts, pools[1], fused.dtype) == is_gathered
    got = attended(KernelHeads(on_device, pools[1], rotations))
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
