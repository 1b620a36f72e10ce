"""Small pools of the protocol's model test, so that they are nearly always full."""

from __future__ import annotations

from dataclasses import replace

from engine.kv.layout import KVLayout

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 2, 8, 2
# Two ranks split the first layer's heads and replicate the second's, so a link may carry one layer only.
_LAYOUT = KVLayout(
    model="m", num_layers=NUM_LAYERS, num_kv_heads=(2, 1), head_dim=(4, 8), block_size=BLOCK_SIZE, dtype="float32"
)


def layout(tp: int) -> KVLayout:
    return replace(_LAYOUT, tensor_parallel=tp)
