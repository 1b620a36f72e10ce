"""Distribution of the serving revisions from the controller to its routers, and of the routers' counts back.

    <name>:revisions            signature and table (JSON)
    <name>:revisions:counts     hash: router -> signature and counts (JSON), of one update

All methods raise redis.RedisError if Redis is unreachable. Lost records are written again; unsigned ones are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

from redis.asyncio import Redis

from core.identity.deployment_secrets import signed, verified
from core.index.redis_client import repaired
from core.types.revisions import RevisionCounts, RevisionTable, counts_from_json, counts_to_json

logger = logging.getLogger(__name__)


class RevisionChannel:
    """Both sides of the channel. Belongs to an event loop."""

    def __init__(self, redis: Redis, *, name: str, key: bytes, least_version: int = 0) -> None:
        """name: of the deployment. key: its 32-byte signing key. least_version: lowest accepted version of a table."""
        self._redis = redis
        self._key = key
        self._table = f"{name}:revisions"
        self._counts = f"{name}:revisions:counts"
        self._version = least_version - 1  # of the last table read
        self._rejected: object = None  # the last rejected value, logged once

    async def publish(self, table: RevisionTable) -> None:
        await self._redis.set(self._table, signed(table.to_json().encode(), self._key, b"table"))

    async def read(self) -> RevisionTable | None:
        """Return the table if it is newer than the last one read, else None."""
        async with repaired(self._redis, {self._table: "string"}):
            found: Any = await self._redis.get(self._table)
        text = verified(found, self._key, b"table") if found else None
        if text is None:
            if found and found != self._rejected:
                logger.error("ignored the revisions in Redis: signature of another deployment")
                self._rejected = found
            return None
        table = RevisionTable.from_json(text)
        if table.version <= self._version:
            return None
        self._version = table.version
        return table

    async def tell(self, router: str, counts: Mapping[int, RevisionCounts]) -> None:
        """Write this router's cumulative counts."""
        text = counts_to_json(counts).encode()
        async with repaired(self._redis, {self._counts: "hash"}):
            await self._redis.hset(self._counts, router, signed(text, self._key, *_of_router(router.encode())))

    async def counts(self, update: Set[int] | None = None) -> dict[int, RevisionCounts]:
        """Return the sum over all routers. update: revisions of the current update; records with other revisions are
        ignored, because they are stale or replayed. None: accept all."""
        async with repaired(self._redis, {self._counts: "hash"}):
            found: Any = await self._redis.hgetall(self._counts)
        total: dict[int, RevisionCounts] = {}
        for router, record in found.items():
            if (text := verified(record, self._key, *_of_router(router))) is None:
                continue
            counted = counts_from_json(text)
            if update is not None and counted.keys() != update:
                continue
            for number, counts in counted.items():
                total[number] = total.get(number, RevisionCounts()).plus(counts)
        return total

    async def forget_counts(self) -> None:
        """Delete all counts, before another update."""
        await self._redis.delete(self._counts)

    async def close(self) -> None:
        await self._redis.aclose()


def _of_router(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the signed context of a router's counts. The length keeps name and payload apart."""
    return b"counts", len(name).to_bytes(4), name
