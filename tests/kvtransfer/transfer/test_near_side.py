"""Link measurements between two real processes."""

import torch

from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.profile.near_side import NearSide


def test_unlike_and_plain_layers_are_measured() -> None:
    """The far process gets the layout as JSON and must arrive at the same fingerprint."""
    layout = KVLayout(
        model="m",
        num_layers=3,
        num_kv_heads=(4, 2, 4),
        head_dim=(16, 32, 16),
        block_size=16,
        dtype="int8",
        plain_layers=(1,),
    )
    with NearSide() as near:
        pool = KVPool(layout, num_blocks=2, device=torch.device("cpu"))
        sender = near.sender(pool, wire_dtype="raw", backend="tcp")
        transfer = sender.begin(20)
        transfer.all_layers_ready(0, 20)
        transfer.commit(20, [1])
        shipment, _ = sender.finish(transfer)
    assert shipment.wire_bytes > 20 * layout.bytes_per_token()
