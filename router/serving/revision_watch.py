"""Watch of the deployment's revisions in Redis, and the report of request counts per revision to the controller."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.redis_client import RedisReach
from core.index.revision_channel import RevisionChannel
from core.types.revisions import RevisionTable
from router.routing.revisions import Revisions

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


class RevisionWatch:
    """Follower of the revision table. Owns `redis`. While Redis is unavailable the known revisions stay."""

    def __init__(
        self,
        redis: Redis,
        revisions: Revisions,
        *,
        name: str,
        key: bytes,
        router: str,
        known: RevisionTable | None = None,
    ) -> None:
        """name: deployment. key: key with which its processes sign revision messages. router: name of this router.
        known: table received from the controller directly; older tables in Redis are ignored."""
        self._redis = redis
        self._revisions = revisions
        self._channel = RevisionChannel(redis, name=name, key=key, least_version=known.version if known else 0)
        if known:
            revisions.take(known)
        self._router = router
        self._reach = RedisReach("requests go to the known revisions")

    async def follow_forever(self) -> None:
        """Follow the revision table and report counts until cancelled."""
        me = asyncio.current_task()
        while not (me and me.cancelling()):  # redis-py may swallow a cancellation
            try:
                await self._look()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            except (ValueError, KeyError, TypeError) as error:
                logger.error("malformed revision table in Redis: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _look(self) -> None:
        if table := await self._channel.read():
            self._take(table)
        if self._revisions.is_split:
            await self._channel.tell(self._router, self._revisions.counts)

    def _take(self, table: RevisionTable) -> None:
        before = {one.number for one in self._revisions.all}
        self._revisions.take(table)
        if before != {one.number for one in table.revisions}:
            logger.info("revisions: %s", ", ".join(str(one.number) for one in table.revisions) or "one")
