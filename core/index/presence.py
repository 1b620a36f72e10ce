"""Presence of one replica in Redis: its lease and the blocks that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.membership import RENEW_S, Member, Membership
from core.index.redis_client import RedisReach
from core.index.store import IndexWriter
from core.types.tier import Tier

_FLUSH_S = 0.02  # window in which changes are batched into one event
_END_S = 1.0  # limit for `run` to end after its cancellation


class Presence:
    """Task that renews the lease and publishes block events. Serving continues while Redis is unreachable.

    `snapshot` returns the blocks that the replica holds. It is called at the start and when events may have been lost.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        name: str,
        key: bytes,
        member: Member,
        snapshot: Callable[[], Awaitable[Mapping[bytes, Tier]]],
    ) -> None:
        """name: of the deployment. key: signing key of its members."""
        self._redis = redis
        self._member = member
        self._membership = Membership(redis, name=name, key=key)
        self._writer = IndexWriter(redis, name=name, replica=member.replica)
        self._snapshot = snapshot
        self._changes: dict[bytes, Tier | None] = {}
        self._changed = asyncio.Event()
        self._is_whole = False  # Redis has all blocks of the last snapshot and of later flushes
        self._is_leaving = False
        self._is_idle = asyncio.Event()  # `run` uses no connection
        self._is_idle.set()
        self._reach = RedisReach("serving continues without it")

    def publish(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Queue the new tier of each block; None: no longer held. Later calls override earlier ones."""
        self._changes.update(changes)
        self._changed.set()

    async def run(self) -> None:
        """Renew and publish until cancelled."""
        self._is_idle.clear()
        try:
            async with asyncio.TaskGroup() as group:  # the failure of one task cancels the other
                group.create_task(self._every(RENEW_S, self._renew))
                group.create_task(self._flush_forever())
        finally:
            self._is_idle.set()

    async def leave(self) -> None:
        """Leave membership and index at once, if Redis is reachable, and close the connection."""
        self._is_leaving = True
        self._changed.set()
        await self._try(self._leave)
        # A cancelled `run` may still be opening a connection, which would outlive the pool.
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._is_idle.wait()
        await self._redis.aclose()

    async def _flush_forever(self) -> None:
        while not self._is_leaving:  # redis-py may swallow a cancellation
            await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(_FLUSH_S)
            if not self._is_leaving:
                await self._try(self._flush)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while not self._is_leaving:
            await self._try(action)
            await asyncio.sleep(seconds)

    async def _renew(self) -> None:
        stayed = await self._membership.renew(self._member)
        if not (stayed and self._is_whole and await self._writer.renew()):
            self._is_whole = False
            self._changes = {}
            await self._writer.reset(await self._snapshot())
            self._is_whole = True
            self._changed.set()  # flush the changes that arrived during the reset

    async def _flush(self) -> None:
        if self._is_whole and self._changes:
            changes, self._changes = self._changes, {}
            await self._writer.publish(changes)

    async def _leave(self) -> None:
        await self._membership.leave(self._member.replica)
        await self._writer.reset({})

    async def _try(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
            self._reach.found(action.__name__)
        except RedisError as error:
            self._reach.missed(error, action.__name__)
            self._is_whole = False
