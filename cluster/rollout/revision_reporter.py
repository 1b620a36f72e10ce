"""What routers know of revisions, kept up to date in Redis; and what they have counted of each, read from there."""

from __future__ import annotations

import asyncio
import logging

from redis.exceptions import RedisError

from core.identity.deployment_secrets import Purpose
from core.index.redis_client import RedisReach, connect_redis
from core.index.revision_channel import RevisionChannel
from core.process.supervisor import Supervisor
from core.types.launch import Launch
from core.types.revisions import RevisionCounts, RevisionTable

logger = logging.getLogger(__name__)

_TELL_S = 0.5


class RevisionReporter:
    """Owned by the controller, on its event loop. While Redis is away, routers go on with what they know."""

    def __init__(self, launch: Launch) -> None:
        self.table = RevisionTable()
        self.counts: dict[int, RevisionCounts] = {}  # of this update, by all routers
        self._forgets = False
        self._is_closing = False
        self._changed = asyncio.Event()
        credentials = launch.credentials
        self._channel = RevisionChannel(
            connect_redis(credentials.index_url), name=launch.spec.name, key=credentials.key(Purpose.REVISIONS)
        )
        self._reach = RedisReach("routers go on with the revisions they know")
        self._task = Supervisor().start("telling routers the revisions", self._report_forever)

    def begin(self) -> None:
        """An update begins: what was counted of earlier ones is forgotten."""
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

    async def _report_forever(self) -> None:
        while not self._is_closing:  # redis-py may swallow a cancellation
            self._changed.clear()
            try:
                await self._tell()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            except (ValueError, TypeError, KeyError) as error:
                logger.error("what routers say of revisions cannot be read: %s", error)
            try:
                async with asyncio.timeout(_TELL_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _tell(self) -> None:
        table = self.table
        if not table.version:  # there never was an update: nobody need know
            return
        if self._forgets:
            await self._channel.forget_counts()
            self._forgets = False
        await self._channel.publish(table)
        if table.revisions:
            self.counts = await self._channel.counts({one.number for one in table.revisions})
