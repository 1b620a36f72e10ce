"""How one replica is seen from outside: its lease, and the blocks that it holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cluster.index.membership import RENEW_S, Member, Membership
from cluster.index.store import IndexWriter
from cluster.words.tier import Tier

logger = logging.getLogger(__name__)

_FLUSH_S = 0.02  # events of this long travel together
_REDIS_TIMEOUT_S = 2.0


def connect_redis(url: str, *, within_s: float = _REDIS_TIMEOUT_S) -> Redis:
    """A client with deadlines: within_s of an answer. It connects on first use.

    It tries nothing twice: whoever uses it must know that Redis was away, for it may have come back empty.
    """
    return Redis.from_url(
        url,
        socket_timeout=within_s,
        socket_connect_timeout=within_s,
        retry=Retry(NoBackoff(), 0),
    )


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
        self._is_away = False

    def publish(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Where blocks are now held; None: no longer. The last word on each counts."""
        self._changes.update(changes)
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(self._every(RENEW_S, self._renew), self._flush_forever())

    async def leave(self) -> None:
        """Out of membership and index, at once, as far as Redis can be reached; the connection is closed."""
        await self._try(self._leave)
        await self._redis.aclose()

    async def _flush_forever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(_FLUSH_S)
            await self._try(self._flush)

    async def _every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
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
            if self._is_away:
                logger.info("Redis is back")
            self._is_away = False
        except RedisError as error:
            if not self._is_away:
                logger.warning("Redis is away; serving goes on without it: %s", error)
            self._is_away = True
            self._is_whole = False
