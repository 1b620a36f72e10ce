"""KV transfer between the pools of two processes, on CPUs and on GPUs, and its measurement."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.profile.near_side import NearSide
from kvtransfer.protocol.frames import Opening, Segment
from kvtransfer.transfer.codec import codec_for, slots_of
from tests.kvtransfer.replicas import far_replica, handoff_to, replica

_LAYOUT = KVLayout(model="m", num_layers=4, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
_NUM_BLOCKS, _NUM_TOKENS = 24, 187  # ends within a block, and within a word of the last payload
_OURS = [5, 2, 9, 0, 7, 23, 11, 3, 16, 21, 1, 13]
_THEIRS = [
    [3, 1, 8, 11, 6, 0, 2, 4, 5, 7, 9, 10],
    [12, 23, 13, 22, 14, 21, 15, 20, 16, 19, 17, 18],
]  # blocks of two handoffs


@pytest.mark.timeout(110)  # kernels may have to be compiled first
@pytest.mark.parametrize(
    ("pool_dtype", "wire"),
    [("bfloat16", "raw"), ("bfloat16", "fp8_e4m3"), ("bfloat16", "int4"), ("fp8_e4m3", "raw"), ("int4", "raw")],
)
@pytest.mark.parametrize(("device", "link"), [("cpu", "tcp"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)])
def test_kv_is_equal_after_the_transfer(device: str, link: str, pool_dtype: str, wire: str) -> None:
    """Two concurrent handoffs, by layer and chunk, change no other blocks."""
    asyncio.run(_carry_over(device, link, pool_dtype, wire))  # the GPU machine may lack pytest-asyncio


async def _carry_over(device: str, link: str, pool_dtype: str, wire: str) -> None:
    layout = replace(_LAYOUT, dtype=pool_dtype)
    config = {"num_blocks": _NUM_BLOCKS, "device": device, "link": link, "wire": wire}
    openings = [
        Opening(handoff=f"h{i}", num_tokens=_NUM_TOKENS, max_tokens=_NUM_TOKENS, block_ids=tuple(blocks))
        for i, blocks in enumerate(_THEIRS)
    ]
    with far_replica(layout, openings, **config) as far:
        async with replica(layout, group_bytes=40_000, **config) as near:
            kv = _filled(near.pools[0])
            for i in range(len(_THEIRS)):
                near.ship(handoff_to([far.address], _NUM_TOKENS, id=f"h{i}"), _OURS, chunks=(50, 130, _NUM_TOKENS))
            for _ in _THEIRS:
                assert (await near.shipped()).error is None
            landed = await asyncio.to_thread(far.read)
    expected = KVPool(layout, num_blocks=_NUM_BLOCKS, device=torch.device("cpu"))
    for blocks in _THEIRS:
        _carry(kv, expected, blocks, wire)
    assert kv.codes[0].view(torch.uint8).any()
    for ours, theirs in zip([*expected.codes, *expected.scales], landed, strict=True):
        assert torch.equal(ours.view(torch.uint8), torch.from_numpy(theirs))


def _filled(pool: KVPool) -> KVPool:
    """Fill the pool with random numbers and return a copy on the CPU."""
    copy = KVPool(pool.layout, num_blocks=_NUM_BLOCKS, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(_NUM_BLOCKS * pool.layout.block_size)
    for layer in range(pool.layout.num_layers):
        k, v = torch.randn(2, len(slots), 4, 64, generator=generator).to(torch.bfloat16)
        copy.write(layer, slots, k, v)
    for there, here in zip([*pool.codes, *pool.scales], [*copy.codes, *copy.scales], strict=True):
        there.view(torch.uint8).copy_(here.view(torch.uint8))
    return copy


def _carry(source: KVPool, target: KVPool, blocks: list[int], wire: str) -> None:
    """Copy KV with the codec alone, to get the expected result of a handoff."""
    codec = codec_for(source.layout, wire)
    segment = Segment(first_layer=0, num_layers=4, first_token=0, num_tokens=_NUM_TOKENS)
    heads = [range(4)] * 4
    payload = torch.empty(codec.num_bytes(segment, heads), dtype=torch.uint8)
    codec.pack(source, segment, heads, slots_of(source, _OURS, 0, _NUM_TOKENS), payload)
    codec.unpack(payload, target, segment, heads, slots_of(target, blocks, 0, _NUM_TOKENS))


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
