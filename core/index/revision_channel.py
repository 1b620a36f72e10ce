"""Which revisions of a deployment serve, from its controller to its routers; and what becomes of requests on each.

    <name>:revisions            a seal, and the table as JSON
    <name>:revisions:counts     hash: router -> a seal, and its counts as JSON; of one update

Raises redis.RedisError when Redis is away. What it loses is told again; who else may write there is not believed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from typing import Any

from redis.asyncio import Redis

from core.identity.signing import signed, verified
from core.types.revisions import RevisionCounts, RevisionTable, counts_from_json, counts_to_json

logger = logging.getLogger(__name__)


class RevisionChannel:
    """Either end. Belongs to an event loop."""

    def __init__(self, redis: Redis, *, name: str, key: bytes, least_version: int = 0) -> None:
        """name: of the deployment. key: 32 bytes that its processes have, and nobody else. least_version: of a table
        that is read."""
        self._redis = redis
        self._key = key
        self._table = f"{name}:revisions"
        self._counts = f"{name}:revisions:counts"
        self._version = least_version - 1  # of the last table read
        self._passed_over: object = None  # of which we have said so

    async def publish(self, table: RevisionTable) -> None:
        """Have Redis say this."""
        await self._redis.set(self._table, signed(table.to_json().encode(), self._key, b"table"))

    async def read(self) -> RevisionTable | None:
        """The table, where it is newer than what was read before."""
        found: Any = await self._redis.get(self._table)
        text = verified(found, self._key, b"table") if found else None
        if text is None:
            if found and found != self._passed_over:
                logger.error("the revisions in Redis are passed over: their seal is not this deployment's")
                self._passed_over = found
            return None
        table = RevisionTable.from_json(text)
        if table.version <= self._version:
            return None
        self._version = table.version
        return table

    async def tell(self, router: str, counts: Mapping[int, RevisionCounts]) -> None:
        """All that this router has counted so far."""
        text = counts_to_json(counts).encode()
        await self._redis.hset(self._counts, router, signed(text, self._key, *_of_router(router.encode())))

    async def counts(self, update: Set[int] | None = None) -> dict[int, RevisionCounts]:
        """Of all routers together. update: the revisions of this one; what was counted in another, by a router that has
        not heard yet or in a record that somebody has put back, says nothing of it. None: of any."""
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
        """Before another update."""
        await self._redis.delete(self._counts)

    async def close(self) -> None:
        await self._redis.aclose()


def _of_router(name: bytes) -> tuple[bytes, bytes, bytes]:
    """Words of a seal, with the name's length: else a name and what follows it could be parted elsewhere."""
    return b"counts", len(name).to_bytes(4), name
