"""Lease and block events of a replica until it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from core.index.membership import Membership
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.types.tier import Tier
from tests.support.members import make_member
from tests.support.waiting import WITHIN_S

_KEY = bytes(32)


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
    presence = Presence(redis, name="c", key=_KEY, member=make_member(), snapshot=snapshot)
    task = asyncio.create_task(presence.run())
    await started.wait()
    task.cancel()
    await presence.leave()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are still running"
    assert await Membership(redis, name="c", key=_KEY).members() == []
    await redis.aclose()
