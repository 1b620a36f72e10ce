"""How one replica is seen from outside: its lease, and the blocks that it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.membership import RENEW_S, Member, Membership
from core.index.redis_client import RedisReach
from core.index.store import IndexWriter
from core.types.tier import Tier

_FLUSH_S = 0.02  # events of this long travel together


class Presence:
    """Renews the lease and publishes block events, on the event loop. Serving goes on when Redis does not.

    `snapshot` says which blocks the replica holds; it is asked at the start, and whenever events may have been lost.
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
        """name: of the deployment. key: by which its members sign."""
        self._redis = redis
        self._member = member
        self._membership = Membership(redis, name=name, key=key)
        self._writer = IndexWriter(redis, name=name, replica=member.replica)
        self._snapshot = snapshot
        self._changes: dict[bytes, Tier | None] = {}
        self._changed = asyncio.Event()
        self._is_whole = False  # Redis has everything up to what waits here
        self._is_leaving = False
        self._reach = RedisReach("serving goes on without it")

    def publish(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Where blocks are now held; None: no longer. The last word on each counts."""
        self._changes.update(changes)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:  # one that dies takes the other along
            group.create_task(self._every(RENEW_S, self._renew))
            group.create_task(self._flush_forever())

    async def leave(self) -> None:
        """Out of membership and index, at once, as far as Redis can be reached; the connection is closed."""
        self._is_leaving = True
        self._changed.set()
        await self._try(self._leave)
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
            self._changed.set()  # what has come meanwhile waits to be flushed

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
            self._reach.found()
        except RedisError as error:
            self._reach.missed(error)
            self._is_whole = False
