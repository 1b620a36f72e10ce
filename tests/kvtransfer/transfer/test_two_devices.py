"""KV transfer between the pools of two processes, on CPUs and on GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from core.rpc import transfer_pb2_grpc as rpc
from core.types.handoff import Handoff
from core.wire.channel import listen, make_server
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.protocol.frames import Opening, Segment
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.codec import codec_for, slots_of
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.sender import Sender
from tests.support.forks import forks
from tests.support.identities import in_clear, rank

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
    [
        *(("bfloat16", "raw"), ("bfloat16", "fp8_e4m3"), ("bfloat16", "int4"), ("fp8_e4m3", "raw"), ("int4", "raw")),
    ],
)
@pytest.mark.parametrize(("device", "link"), [("cpu", "tcp"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)])
def test_kv_is_equal_after_the_transfer(device: str, link: str, pool_dtype: str, wire: str) -> None:
    """Two concurrent handoffs, by layer and chunk, change no other blocks."""
    asyncio.run(_carry_over(device, link, pool_dtype, wire))  # the GPU machine may lack pytest-asyncio


async def _carry_over(device: str, link: str, pool_dtype: str, wire: str) -> None:
    layout = replace(_LAYOUT, dtype=pool_dtype)
    config = _config("prefill-0", layout, device=device, link=link, wire=wire)
    kv = _filled(config.pool)
    shipments: asyncio.Queue[Shipment] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with _far_side(layout, device=device, link=link, wire=wire) as (address, orders):
        sender = Sender(
            config,
            loop=loop,
            on_shipped=lambda x: loop.call_soon_threadsafe(shipments.put_nowait, x),
            group_bytes=40_000,
        )
        for i in range(len(_THEIRS)):
            transfer = sender.begin(_handoff(address, f"h{i}", layout), _OURS)
            assert transfer
            begin = 0
            for end in (50, 130, _NUM_TOKENS):
                for layer in range(layout.num_layers):
                    transfer.layer_ready(layer, begin, end)
                begin = end
            transfer.commit(_NUM_TOKENS)
        for _ in _THEIRS:
            async with asyncio.timeout(90):
                assert (await shipments.get()).error is None
        orders.send("read")
        landed = await asyncio.to_thread(orders.recv)
        await sender.close()
    expected = KVPool(layout, num_blocks=_NUM_BLOCKS, device=torch.device("cpu"))
    for blocks in _THEIRS:
        _carry(kv, expected, blocks, wire)
    assert kv.codes[0].view(torch.uint8).any()
    for ours, theirs in zip([*expected.codes, *expected.scales], landed, strict=True):
        assert torch.equal(ours.view(torch.uint8), torch.from_numpy(theirs))


def _config(replica: str, layout: KVLayout, *, device: str, link: str, wire: str) -> LinkConfig:
    return LinkConfig(
        rank=0,
        identity=in_clear(rank(replica)),
        pool=KVPool(layout, num_blocks=_NUM_BLOCKS, device=torch.device(device)),
        wire_dtype=wire,
        backend=link,
        host="127.0.0.1",
        timeout_s=60.0,
        guard=LinkGuard(bytes(32)),
    )


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


def _handoff(address: str, id: str, layout: KVLayout) -> Handoff:
    return Handoff(
        id=id,
        epoch=1,
        replica="decode-0",
        ranks=(address,),
        layout=layout.fingerprint,
        num_tokens=_NUM_TOKENS,
        max_tokens=_NUM_TOKENS,
        first_token=0,
        ttl_s=60,
    )


@asynccontextmanager
async def _far_side(layout: KVLayout, **how: str) -> AsyncIterator[tuple[str, Connection]]:
    ours, theirs = forks.Pipe()
    process = forks.Process(target=_receive, args=(theirs, asdict(layout), how), daemon=True)
    process.start()
    try:
        yield await asyncio.to_thread(ours.recv), ours
    finally:
        process.kill()
        process.join(10)


def _receive(orders: Connection, layout: dict[str, Any], how: dict[str, str]) -> None:
    os.environ["NCCL_HOSTID"] = "the peer's"  # allows two NCCL ranks on one GPU
    asyncio.run(_serve(orders, KVLayout(**layout), how))


async def _serve(orders: Connection, layout: KVLayout, how: dict[str, str]) -> None:
    config = _config("decode-0", layout, device=how["device"], link=how["link"], wire=how["wire"])
    servicer = RankServicer()
    receiver = servicer.receiver = Receiver(config, rendezvous=servicer.rendezvous, on_landed=lambda landing: None)
    for i, blocks in enumerate(_THEIRS):
        receiver.open(Opening(handoff=f"h{i}", num_tokens=_NUM_TOKENS, max_tokens=_NUM_TOKENS, block_ids=tuple(blocks)))
    server = make_server(config.identity)
    rpc.add_RankServicer_to_server(servicer, server)
    orders.send(f"127.0.0.1:{listen(server, '127.0.0.1:0', config.identity)}")
    await server.start()
    assert await asyncio.to_thread(orders.recv) == "read"
    orders.send([part.view(torch.uint8).cpu().numpy() for part in [*config.pool.codes, *config.pool.scales]])
    await server.wait_for_termination()
