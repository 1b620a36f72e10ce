"""A file while it is sent: kept part by part as it comes, and seen by nobody before its end."""

from __future__ import annotations

import logging
import time

from redis.exceptions import RedisError

from core.types.errors import RequestError, RequestTooLarge
from router.batches.bounds import BatchBounds
from router.batches.records import INPUT, FileRecord
from router.batches.redis_batches import RedisBatches
from router.batches.store_access import asked, check_room, new_file_id

logger = logging.getLogger(__name__)

PART_BYTES = 256 * 2**10  # of an input file, as it is kept


class NewFile:
    """Of one tenant."""

    def __init__(self, store: RedisBatches, tenant: str, bounds: BatchBounds) -> None:
        self.id = new_file_id()
        self._store = store
        self._bounds = bounds
        self._place = store.place(tenant, self.id)
        self._pending = bytearray()
        self._num_parts = self._num_bytes = 0

    async def add(self, content: bytes) -> None:
        """Raises RequestTooLarge, RequestError, CapacityError, StoreUnavailable."""
        self._num_bytes += len(content)
        if self._num_bytes > (most := self._bounds.max_file_bytes):
            raise RequestTooLarge(f"file: has more than the {most} bytes that are taken here", param="file")
        self._pending += content
        while len(self._pending) >= PART_BYTES:
            await self._put(bytes(self._pending[:PART_BYTES]))
            del self._pending[:PART_BYTES]

    async def end(self, *, name: str, keep_s: float | None = None) -> FileRecord:
        """keep_s: less than the bounds say. Raises as `add`."""
        if self._pending:
            await self._put(bytes(self._pending))
        now, kept_s = int(time.time()), min(keep_s or self._bounds.keep_s, self._bounds.keep_s)
        record = FileRecord(
            id=self.id,
            name=name,
            purpose=INPUT,
            num_bytes=self._num_bytes,
            num_parts=self._num_parts,
            created_at=now,
            expires_at=now + int(kept_s),
        )
        told = await asked(lambda: self._store.put_file(self._place, record, keep_s=kept_s))
        if told == "many":
            raise RequestError(f"there are {self._bounds.max_files} files already; delete some", param="file")
        return record

    async def drop(self) -> None:
        """It is not wanted; what cannot be dropped now goes by itself."""
        try:
            await self._store.drop_file(self._place)
        except RedisError as error:
            logger.warning("Redis does not drop a file: %s", error)

    async def _put(self, part: bytes) -> None:
        number = self._num_parts
        self._num_parts += 1
        check_room(await asked(lambda: self._store.put_part(self._place, number, part)), self._bounds)
