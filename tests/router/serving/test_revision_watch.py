"""Exchange of revision tables and request counts between router and controller, also during Redis failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis

from core.identity.deployment_secrets import SIGNATURE_BYTES
from core.index.redis_client import connect_redis
from core.index.revision_channel import RevisionChannel
from core.types.revisions import Revision, RevisionCounts, RevisionTable
from router.routing.revisions import Revisions
from router.serving.discovery import RevisionWatch
from tests.support.waiting import becomes, told

KEY = bytes(range(32))
REVISIONS = tuple(
    Revision(number=number, share=0.5, takes_more=True, tokens="t", kind="k", replicas=frozenset({f"decode-{number}"}))
    for number in (1, 2)
)


@asynccontextmanager
async def watched(redis_url: str, *names: str) -> AsyncIterator[tuple[RevisionChannel, list[Revisions]]]:
    """Yield the controller's channel, and the revisions known to a router of each name."""
    redis.Redis.from_url(redis_url).flushall()
    controller = RevisionChannel(connect_redis(redis_url), name="a", key=KEY)
    known = [Revisions() for _ in names]
    watches = [
        RevisionWatch(connect_redis(redis_url), revisions, name="a", key=KEY, router=name)
        for name, revisions in zip(names, known, strict=True)
    ]
    tasks = [asyncio.create_task(watch.follow_forever()) for watch in watches]
    try:
        yield controller, known
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (controller, *watches):
            await end.close()


async def test_routers_take_a_table_and_their_counts_are_summed(redis_url: str) -> None:
    async with watched(redis_url, "router-0", "router-1") as (controller, known):
        await controller.publish(RevisionTable(version=1, revisions=REVISIONS))
        await becomes(lambda: all(revisions.all == REVISIONS for revisions in known))
        for revisions in known:
            revisions.count(2).attempts += 2

        async def both_are_heard() -> bool:
            return (await controller.counts()).get(2) == RevisionCounts(attempts=4)

        await told(both_are_heard)


async def test_known_revisions_survive_redis_loss_and_older_tables_are_ignored(redis_url: str) -> None:
    async with watched(redis_url, "router-0") as (controller, (known,)):
        await controller.publish(RevisionTable(version=2, revisions=REVISIONS))
        await becomes(lambda: known.is_split)
        redis.Redis.from_url(redis_url).flushall()
        await controller.publish(RevisionTable(version=1))

        async def has_looked() -> bool:  # counts are reported after each look
            return bool(await controller.counts())

        await told(has_looked)
        await controller.forget_counts()
        await told(has_looked)
        assert known.is_split
        await controller.publish(RevisionTable(version=3))
        await becomes(lambda: not known.is_split)


async def test_a_table_is_followed_after_a_key_of_another_type(redis_url: str) -> None:
    async with watched(redis_url, "router-0") as (controller, (known,)):
        with redis.Redis.from_url(redis_url) as client:
            client.sadd("a:revisions", "foreign")
            await becomes(lambda: not client.exists("a:revisions"))
        await controller.publish(RevisionTable(version=1, revisions=REVISIONS))
        await becomes(lambda: known.is_split)


async def test_unsigned_entries_are_ignored(redis_url: str) -> None:
    async with watched(redis_url) as (controller, _):
        pending_peer = RevisionChannel(connect_redis(redis_url), name="a", key=bytes(32))
        await pending_peer.publish(RevisionTable(version=9, revisions=REVISIONS))
        await pending_peer.tell("router-0", {2: RevisionCounts(failed=1000)})
        assert await controller.read() is None and await controller.counts() == {}
        await controller.tell("router-0", {2: RevisionCounts(failed=1)})
        raw = redis.Redis.from_url(redis_url)
        raw.hset(
            "a:revisions:counts", "router-1", raw.hget("a:revisions:counts", "router-0")
        )  # replayed under another name
        assert await controller.counts() == {2: RevisionCounts(failed=1)}
        signed = bytes(raw.hget("a:revisions:counts", "router-0") or b"")
        sign, text = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        raw.hset("a:revisions:counts", b"router-0" + text[:1], sign + text[1:])  # the same bytes, split elsewhere
        assert await controller.counts() == {2: RevisionCounts(failed=1)}
        await pending_peer.close()


async def test_counts_of_another_update_are_ignored(redis_url: str) -> None:
    """Both updates share the old revision."""
    async with watched(redis_url) as (controller, _):
        await controller.tell("router-0", {1: RevisionCounts(failed=9), 2: RevisionCounts(failed=9)})
        before = redis.Redis.from_url(redis_url).hgetall("a:revisions:counts")
        await controller.forget_counts()
        redis.Redis.from_url(redis_url).hset("a:revisions:counts", mapping=before)  # type: ignore[arg-type]
        await controller.tell("router-1", {1: RevisionCounts(attempts=1), 3: RevisionCounts(attempts=2)})
        assert await controller.counts({1, 3}) == {1: RevisionCounts(attempts=1), 3: RevisionCounts(attempts=2)}


class FakeSwallowingRedis:
    """Redis client that swallows a cancellation, as redis-py may on a slow connection."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.num_asked = 0

    async def get(self, name: str) -> bytes:
        self.num_asked += 1
        self.is_asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise redis.TimeoutError("too slow") from None
        raise AssertionError


async def test_close_does_not_wait_for_an_unavailable_redis() -> None:
    away: Any = FakeSwallowingRedis()
    watch = RevisionWatch(away, Revisions(), name="a", key=KEY, router="router-0")
    following = asyncio.create_task(watch.follow_forever())
    await away.is_asked.wait()
    following.cancel()
    await asyncio.wait({following}, timeout=5.0)
    assert following.done() and away.num_asked == 1
