"""What a router does about batches: it keeps files, makes batches of them, and works on some."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from core.types.errors import RequestError, StoreUnavailable, UnknownObject
from frontend.access.identity import Client
from router.batches.answering import LineEndpoint
from router.batches.bounds import BatchBounds
from router.batches.job import Workplace
from router.batches.new_file import NewFile
from router.batches.records import INPUT, BatchMade, BatchRecord, FileRecord
from router.batches.redis_batches import RedisBatches
from router.batches.store_access import asked, check_room, new_file_id, store_unavailable
from router.batches.work import BatchWork

LEASE_S = 10.0
AGAIN_S = 0.5
_WITHIN_S = 5.0  # of an answer of Redis: parts of files are larger than what else is asked of it
_MAX_TOLD = 64


class Batches:
    """Of one router; lives on its event loop. What is kept belongs to a tenant, and is not there for another one."""

    def __init__(
        self,
        redis: Redis,
        bounds: BatchBounds,
        *,
        name: str,
        key: bytes,
        client_of: Callable[[str], Client],
        at_a_time: int,
        lease_s: float = LEASE_S,
        again_s: float = AGAIN_S,
    ) -> None:
        """redis: closed with this. client_of: who has the key of this id. at_a_time: lines that this router answers.
        again_s: before a line is tried again whose replica was lost; then twice as long each time."""
        self._redis = redis
        self._bounds = bounds
        self._store = RedisBatches(redis, bounds, name=name, key=key)
        self._client_of = client_of
        self._at_a_time = at_a_time
        self._lease_s = lease_s
        self._again_s = again_s
        self._endpoint: LineEndpoint | None = None
        self._work: BatchWork | None = None

    @classmethod
    def in_redis(
        cls,
        url: str,
        *,
        name: str,
        key: bytes,
        bounds: BatchBounds,
        client_of: Callable[[str], Client],
        at_a_time: int,
        lease_s: float = LEASE_S,
    ) -> Batches | None:
        """Of all routers of the deployment `name`; None where the bounds leave no room."""
        if not bounds.max_bytes:
            return None
        redis = connect_redis(url, within_s=_WITHIN_S)
        return cls(redis, bounds, name=name, key=key, client_of=client_of, at_a_time=at_a_time, lease_s=lease_s)

    @property
    def max_file_bytes(self) -> int:
        return self._bounds.max_file_bytes

    @property
    def endpoints(self) -> list[str]:
        return sorted(self._endpoint.endpoints) if self._endpoint else []

    def answered_by(self, target: LineEndpoint) -> None:
        """Before `start`."""
        self._endpoint = target
        self._work = BatchWork(
            Workplace(
                store=self._store,
                bounds=self._bounds,
                target=target,
                client_of=self._client_of,
                slots=asyncio.Semaphore(self._at_a_time),
                at_a_time=self._at_a_time,
                lease_s=self._lease_s,
                again_s=self._again_s,
            )
        )

    def new_file(self, tenant: str) -> NewFile:
        return NewFile(self._store, tenant, self._bounds)

    async def file(self, tenant: str, id: str, *, param: str | None = None) -> FileRecord:
        """param: the field that names it. Raises UnknownObject, StoreUnavailable."""
        place = self._store.place(tenant, id)
        if (record := await asked(lambda: self._store.file(place))) is None:
            raise _unknown("file", id, param)
        return record

    async def files(self, tenant: str, *, after: str | None, is_newest_first: bool) -> list[FileRecord]:
        """All that come after one of them. Raises StoreUnavailable."""

        async def listed() -> list[FileRecord]:
            places = await self._store.listed("files", tenant, after=after, is_newest_first=is_newest_first)
            found = [await self._store.file(place) for place in places]
            return [record for record in found if record]

        return await asked(listed)

    async def content(self, tenant: str, record: FileRecord) -> AsyncIterator[bytes]:
        """Of a file. Raises StoreUnavailable, in the middle, too."""
        place, num = self._store.place(tenant, record.id), 0
        numbers = await asked(lambda: self._store.numbers(place))
        part_bytes = record.num_bytes // max(1, record.num_parts)
        try:
            async for part in self._store.parts(place, numbers, part_bytes=part_bytes):
                num += len(part)
                yield part
        except RedisError as error:
            raise store_unavailable() from error
        if num != record.num_bytes:
            raise StoreUnavailable(f"file {record.id}: parts of it are gone")

    async def delete_file(self, tenant: str, id: str) -> None:
        """Raises UnknownObject, StoreUnavailable."""
        await self.file(tenant, id)
        place = self._store.place(tenant, id)
        if not await asked(lambda: self._store.drop_file(place)):
            raise _unknown("file", id, None)

    async def create(
        self, client: Client, *, input_file_id: str, endpoint: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Raises UnknownObject, RequestError, CapacityError, StoreUnavailable."""
        if endpoint not in self.endpoints:
            text = f"endpoint: must be one of {', '.join(self.endpoints)}"
            raise RequestError(text, param="endpoint")
        tenant = client.tenant
        record = await self.file(tenant, input_file_id, param="input_file_id")
        if record.purpose != INPUT:
            text = f"input_file_id: {record.id} was not sent with purpose={INPUT}"
            raise RequestError(text, param="input_file_id")
        now = int(time.time())
        made = BatchMade(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            key_id=client.key_id,
            endpoint=endpoint,
            input_file_id=record.id,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            created_at=now,
            expires_at=now + int(self._bounds.window_s),
            metadata=metadata,
        )
        place, file = self._store.place(tenant, made.id), self._store.place(tenant, record.id)
        keep_s = self._bounds.window_s + self._bounds.keep_s
        told = await asked(lambda: self._store.create(place, made, input_file=file, keep_input_s=keep_s))
        if told == "unknown":
            raise _unknown("file", input_file_id, "input_file_id")
        if told == "many":
            raise RequestError(f"there are {self._bounds.max_batches} batches already; the oldest go in some days")
        check_room(told, self._bounds)
        if self._work:
            self._work.look()
        return await self.batch(tenant, made.id)

    async def batch(self, tenant: str, id: str) -> BatchRecord:
        """Raises UnknownObject, StoreUnavailable."""
        place = self._store.place(tenant, id)
        if (record := await asked(lambda: self._store.batch(place))) is None:
            raise _unknown("batch", id, None)
        return record

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """The newest first, and whether there are more. Raises StoreUnavailable."""

        async def listed() -> tuple[list[BatchRecord], bool]:
            places = await self._store.listed("batches", tenant, after=after, is_newest_first=True)
            found = [await self._store.batch(place) for place in places[:limit]]
            return [record for record in found if record], len(places) > limit

        return await asked(listed)

    async def cancel(self, tenant: str, id: str) -> BatchRecord:
        """Raises UnknownObject, RequestError where it has ended, StoreUnavailable."""
        record = await self.batch(tenant, id)
        place = self._store.place(tenant, id)
        if not await asked(lambda: self._store.cancel(place, at=int(time.time()))):
            record = await self.batch(tenant, id)
            if record.status != "cancelled":
                raise RequestError(f"batch {id} is {record.status}: there is nothing left to cancel")
        return await self.batch(tenant, id)

    def start(self, tasks: Supervisor) -> None:
        """Work on batches, until `leave`."""
        assert self._work
        self._work.start(tasks)

    async def leave(self) -> None:
        """Work on them no longer. What this router worked on is left to the others, at once."""
        if self._work:
            await self._work.close()

    async def close(self) -> None:
        """After `leave`: whoever asks meanwhile is answered."""
        await self._redis.aclose()


def _unknown(what: str, id: str, param: str | None) -> UnknownObject:
    return UnknownObject(f"{param or what}: there is no {what} {id[:_MAX_TOLD]!r}", param=param)
