"""Revision table published to routers through Redis, and the request counts that routers write there."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from redis.exceptions import RedisError

from core.identity.deployment_secrets import Purpose
from core.index.redis_client import RedisReach, connect_redis
from core.index.revision_channel import RevisionChannel
from core.process.supervisor import Supervisor
from core.types.launch import Launch
from core.types.revisions import RevisionCounts, RevisionTable

logger = logging.getLogger(__name__)

_PUBLISH_S = 0.5


class RevisionReporter:
    """Publisher of the revision table, owned by the controller on its event loop.

    While Redis is unavailable, routers keep the last table.
    """

    def __init__(self, launch: Launch) -> None:
        self.table = RevisionTable()
        # Counts of the current update, summed over all routers.
        self.counts: dict[int, RevisionCounts] = {}
        self._forgets = False
        self._is_closing = False
        self._changed = asyncio.Event()
        credentials = launch.credentials
        self._channel = RevisionChannel(
            connect_redis(credentials.index_url), name=launch.spec.name, key=credentials.key(Purpose.REVISIONS)
        )
        self._reach = RedisReach("routers keep the last revision table")
        self._task = Supervisor().start("publish revisions", self._publish_forever)

    def begin(self) -> None:
        """Start an update: drop the counts of earlier ones."""
        self.counts, self._forgets = {}, True

    def tell(self, table: RevisionTable) -> None:
        if table != self.table:
            self.table = table
            self._changed.set()

    async def close(self) -> None:
        self._is_closing = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _publish_forever(self) -> None:
        while not self._is_closing:  # redis-py may swallow a cancellation
            self._changed.clear()
            try:
                await self._publish()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            except (ValueError, TypeError, KeyError) as error:
                logger.error("unreadable revision counts error=%s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PUBLISH_S):
                    await self._changed.wait()

    async def _publish(self) -> None:
        table = self.table
        # Routers need no table before the first update.
        if not table.version:
            return
        if self._forgets:
            await self._channel.forget_counts()
            self._forgets = False
        await self._channel.publish(table)
        if table.revisions:
            self.counts = await self._channel.counts({one.number for one in table.revisions})
