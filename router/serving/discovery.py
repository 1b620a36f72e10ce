"""Discovery of replicas and of their cached blocks through Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.membership import Membership, RejectionReason
from core.index.redis_client import RedisReach
from core.index.store import IndexReader
from core.process.supervisor import Supervisor
from router.serving.replicas import Replicas

_REFRESH_S = 0.25  # how often membership is read
_FOLLOW_MS = 500


class Discovery:
    """Follower of the membership and the block index in Redis. Owns `redis`.

    While Redis is unavailable the known replicas stay: the frames of each show whether it is alive.
    """

    def __init__(
        self,
        redis: Redis,
        replicas: Replicas,
        *,
        name: str,
        key: bytes,
        tasks: Supervisor | None = None,
        count_rejected: Callable[[RejectionReason], object] = lambda why: None,
    ) -> None:
        """name: deployment. key: key with which members sign their records. tasks: supervisor of the background tasks;
        None: a new one. count_rejected: called for each membership record with a bad signature or format."""
        self._redis = redis
        self._replicas = replicas
        self._membership = Membership(redis, name=name, key=key, count_rejected=count_rejected)
        self._reader = IndexReader(redis, replicas.index, name=name)
        self.has_read = False  # membership has been read at least once
        self._reach = RedisReach("routing continues with the known replicas")
        self._is_closing = False
        self._supervisor = tasks or Supervisor()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            self._supervisor.start("membership", lambda: self._forever(self._refresh)),
            self._supervisor.start("index", lambda: self._forever(self._follow_index)),
        ]

    async def close(self) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _refresh(self) -> None:
        members = {member.replica: member for member in await self._membership.members()}
        for replica, member in members.items():
            if not self._replicas.get(replica):
                await self._reader.load([replica])
                self._replicas.add(member)
        for replica in [r.id for r in self._replicas if r.id not in members and not r.is_alive]:
            self._replicas.remove(replica)
            await self._reader.forget(replica)
        self.has_read = True
        await asyncio.sleep(_REFRESH_S)

    async def _follow_index(self) -> None:
        await self._reader.follow([replica.id for replica in self._replicas], wait_ms=_FOLLOW_MS)

    async def _forever(self, action: Callable[[], Awaitable[None]]) -> None:
        while not self._is_closing:  # redis-py may swallow a cancellation
            try:
                await action()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
                await asyncio.sleep(_REFRESH_S)
