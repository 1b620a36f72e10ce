"""Lease and block events of a replica until it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from core.index import membership, presence
from core.index.membership import Membership
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.types.tier import Tier
from tests.support.members import make_member
from tests.support.redis_at import redis_at
from tests.support.waiting import WITHIN_S, told

_KEY = bytes(32)


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 0.3)
    monkeypatch.setattr(presence, "RENEW_S", 0.1)


async def test_leave_is_final_even_if_a_cancellation_is_swallowed(redis_url: str) -> None:
    started = asyncio.Event()

    async def snapshot() -> Mapping[bytes, Tier]:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # redis-py may do this
            pass
        return {}

    redis = connect_redis(redis_url)
    await redis.flushall()
    present = Presence(redis, name="c", key=_KEY, member=make_member(), snapshot=snapshot)
    task = asyncio.create_task(present.run())
    await started.wait()
    task.cancel()
    await present.leave()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are still running"
    assert await Membership(redis, name="c", key=_KEY).members() == []
    await redis.aclose()


@pytest.mark.parametrize("loss", ["everything", "blocks", "a refused change", "an event"])
async def test_lease_and_blocks_that_redis_lost_are_written_again(loss: str, tmp_path: Path) -> None:
    held, new = {bytes(16): Tier.DEVICE}, bytes([1]) * 16
    member = make_member()
    lease, blocks = f"c:member:{member.replica}", f"c:blocks:{member.replica}:device"

    async def snapshot() -> Mapping[bytes, Tier]:
        return dict(held)

    async def is_complete() -> bool:
        has_stream = await redis.type("c:events") == b"stream"
        has_lease = bool(await redis.exists(lease))
        return has_stream and has_lease and await redis.smembers(blocks) == set(held)  # type: ignore[misc]

    async def is_refused() -> bool:
        return not await redis.exists(lease)

    with redis_at("127.0.0.1", tmp_path) as url:
        redis = connect_redis(url)
        present = Presence(connect_redis(url), name="c", key=_KEY, member=member, snapshot=snapshot)
        task = asyncio.create_task(present.run())
        await told(is_complete)
        match loss:
            case "everything":
                await redis.flushall()
            case "blocks":
                await redis.unlink(blocks)
            case "a refused change":
                await redis.config_set("maxmemory", "1")
                held[new] = Tier.DEVICE
                present.publish({new: Tier.DEVICE})
                await told(is_refused)
                await redis.config_set("maxmemory", "0")
            case "an event":  # routers would never learn of this change
                await redis.delete("c:events")
                await redis.set("c:events", "foreign")
                held[new] = Tier.DEVICE
                present.publish({new: Tier.DEVICE})
        await told(is_complete)
        await present.leave()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await redis.aclose()
