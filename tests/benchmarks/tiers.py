"""What lower tiers cost, and the index in Redis: `python -m tests.benchmarks.tiers`. See docs/benchmarks/tiers.md.

Blocks have the layout of SmolLM2-135M in bfloat16. CPU time of the calling thread, so that what else the machine does
counts little. Rates are by the clock.
"""

from __future__ import annotations

import asyncio
import os
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from redis.asyncio import Redis

from core.index.prefix_index import PrefixIndex
from core.index.redis_server import RedisAddress, RedisServer
from core.index.store import IndexReader, IndexWriter
from core.process.ports import free_port
from core.types.tier import Tier
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.tiers.block_file import Stamp
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource, Save, Spill, TierOrders
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import RankTiers

_LAYOUT = KVLayout(model="m", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
_CPU = torch.device("cpu")
_NUM_BLOCKS = 512
_HASHES = [number.to_bytes(16, "big") for number in range(_NUM_BLOCKS)]
_NUM_INDEXED = 200_000
_WAIT_S = 60.0


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        _copies(Path(directory))
        asyncio.run(_index(Path(directory)))


def _copies(directory: Path) -> None:
    pool = KVPool(_LAYOUT, num_blocks=_NUM_BLOCKS, device=_CPU)
    for codes in pool.codes:
        codes.normal_()
    host = HostStore(num_places=_NUM_BLOCKS, block_bytes=_LAYOUT.block_bytes, device=_CPU)
    disk = DiskStore(directory, Stamp(_LAYOUT, rank=0, key=bytes(32)), num_places=_NUM_BLOCKS)
    assert disk.wait_until_written(timeout_s=_WAIT_S)
    answers: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
    rank = RankTiers(pool, host=host, disk=disk, on_loaded=answers.put)
    blocks = range(256)
    print(f"a block has {_LAYOUT.block_bytes:,} bytes")
    for name in ("into new memory", "again"):
        saves = [Save(Tier.HOST, block, block, _HASHES[block]) for block in blocks]
        _report(f"device to host, {name}", lambda s=saves: _in_steps(rank, s))  # type: ignore[misc]
    spills = TierOrders(spills=[Spill(block, block, _HASHES[block]) for block in blocks])
    _report("host to the disk's queue", lambda: rank.carry_out(spills))
    started = time.monotonic()
    assert disk.wait_until_written(timeout_s=_WAIT_S)
    print(f"written by its thread: {256 * _LAYOUT.block_bytes / (time.monotonic() - started) / 1e6:.0f} MB/s")
    for tier in (Tier.HOST, Tier.DISK):
        order = LoadOrder(0, [LoadSource(tier, block, _HASHES[block], 256 + block) for block in blocks])
        rank.carry_out(TierOrders(loads=[order]))
        answer = answers.get(timeout=_WAIT_S)
        print(f"{tier.name.lower()} to device: {answer.num_bytes[tier] / answer.seconds[tier] / 1e6:.0f} MB/s")
    rank.close()


def _in_steps(rank: RankTiers, saves: list[Save]) -> None:
    for start in range(0, len(saves), 32):  # a step of 512 tokens evicts as many at most
        rank.carry_out(TierOrders(saves=saves[start : start + 32]))


def _report(name: str, work: Callable[[], None]) -> None:
    started = time.thread_time()
    work()
    print(f"{name}: {(time.thread_time() - started) / 256 * 1e6:.0f} us of CPU per block")


async def _index(directory: Path) -> None:
    address = RedisAddress(free_port())
    server = RedisServer(address, log=directory / "redis.log")
    server.start()
    async with Redis.from_url(address.url) as redis:
        before = (await redis.info("memory"))["used_memory"]
        writer = IndexWriter(redis, name="c", replica="decode-0")
        await writer.reset({os.urandom(16): Tier.DEVICE for _ in range(_NUM_INDEXED)})
        after = (await redis.info("memory"))["used_memory"]
        started = time.monotonic()
        await IndexReader(redis, PrefixIndex(), name="c").load(["decode-0"])
        print(f"Redis: {(after - before) / _NUM_INDEXED:.0f} bytes per block", end=", ")
        print(f"a router reads {_NUM_INDEXED / (time.monotonic() - started):,.0f} blocks a second")
    server.stop()


if __name__ == "__main__":
    main()
