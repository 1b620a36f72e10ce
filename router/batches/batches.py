"""What a router does about batches: it keeps files, makes batches of them, and works on those that nobody works on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.index.redis_client import RedisReach, connect_redis
from cluster.process.supervisor import Supervisor
from cluster.words.errors import CapacityError, RequestError, RequestTooLarge, StoreUnavailable, UnknownObject
from router.access.client import Client
from router.batches.answering import LineDoor
from router.batches.bounds import BatchBounds
from router.batches.job import BatchJob, Working, is_cancelled
from router.batches.records import INPUT, BatchMade, BatchRecord, FileRecord
from router.batches.redis_batches import HashedPlace, RedisBatches

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_S = 10.0
PART_BYTES = 256 * 2**10  # of an input file, as it is kept
_LOOK_S = 1.0  # for a batch that nobody works on
_SWEEP_S = 30.0
_MAX_JOBS = 16  # at a time, each of another tenant
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
    ) -> None:
        """redis: closed with this. client_of: who has the key of this id. at_a_time: lines that this router answers."""
        self._redis = redis
        self._bounds = bounds
        self._store = RedisBatches(redis, bounds, name=name, key=key)
        self._client_of = client_of
        self._at_a_time = at_a_time
        self._lease_s = lease_s
        self._door: LineDoor | None = None
        self._jobs: dict[asyncio.Task[None], tuple[BatchJob, HashedPlace, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_come = asyncio.Event()
        self._reach = RedisReach("no batch is begun")

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
        return sorted(self._door.endpoints) if self._door else []

    def answered_by(self, door: LineDoor) -> None:
        """Before `start`."""
        self._door = door

    def new_file(self, tenant: str) -> NewFile:
        return NewFile(self, self._store, tenant, self._bounds)

    async def file(self, tenant: str, id: str, *, param: str | None = None) -> FileRecord:
        """param: the field that names it. Raises UnknownObject, StoreUnavailable."""
        place = self._store.place(tenant, id)
        if (record := await self.asked(lambda: self._store.file(place))) is None:
            raise _unknown("file", id, param)
        return record

    async def files(self, tenant: str, *, after: str | None, is_newest_first: bool) -> list[FileRecord]:
        """All that come after one of them. Raises StoreUnavailable."""

        async def listed() -> list[FileRecord]:
            places = await self._store.listed("files", tenant, after=after, is_newest_first=is_newest_first)
            found = [await self._store.file(place) for place in places]
            return [record for record in found if record]

        return await self.asked(listed)

    async def content(self, tenant: str, record: FileRecord) -> AsyncIterator[bytes]:
        """Of a file. Raises StoreUnavailable, in the middle, too."""
        place, num = self._store.place(tenant, record.id), 0
        numbers = await self.asked(lambda: self._store.numbers(place))
        part_bytes = record.num_bytes // max(1, record.num_parts)
        try:
            async for part in self._store.parts(place, numbers, part_bytes=part_bytes):
                num += len(part)
                yield part
        except RedisError as error:
            raise _away() from error
        if num != record.num_bytes:
            raise StoreUnavailable(f"file {record.id}: parts of it are gone")

    async def delete_file(self, tenant: str, id: str) -> None:
        """Raises UnknownObject, StoreUnavailable."""
        await self.file(tenant, id)
        place = self._store.place(tenant, id)
        if not await self.asked(lambda: self._store.drop_file(place)):
            raise _unknown("file", id, None)

    async def create(
        self, client: Client, *, input_file_id: str, endpoint: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Raises UnknownObject, RequestError, CapacityError, StoreUnavailable."""
        if endpoint not in self.endpoints:
            text = f"endpoint: must be one of {', '.join(self.endpoints)}"
            raise RequestError(text, param="endpoint")
        tenant = client.key.tenant if client.key else ""
        record = await self.file(tenant, input_file_id, param="input_file_id")
        if record.purpose != INPUT:
            text = f"input_file_id: {record.id} was not sent with purpose={INPUT}"
            raise RequestError(text, param="input_file_id")
        now = int(time.time())
        made = BatchMade(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            key_id=client.key.id if client.key else "",
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
        told = await self.asked(lambda: self._store.create(place, made, input_file=file, keep_input_s=keep_s))
        if told == "unknown":
            raise _unknown("file", input_file_id, "input_file_id")
        if told == "many":
            raise RequestError(f"there are {self._bounds.max_batches} batches already; the oldest go in some days")
        self.check_room(told)
        self._has_come.set()
        return await self.batch(tenant, made.id)

    async def batch(self, tenant: str, id: str) -> BatchRecord:
        """Raises UnknownObject, StoreUnavailable."""
        place = self._store.place(tenant, id)
        if (record := await self.asked(lambda: self._store.batch(place))) is None:
            raise _unknown("batch", id, None)
        return record

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """The newest first, and whether there are more. Raises StoreUnavailable."""

        async def listed() -> tuple[list[BatchRecord], bool]:
            places = await self._store.listed("batches", tenant, after=after, is_newest_first=True)
            found = [await self._store.batch(place) for place in places[:limit]]
            return [record for record in found if record], len(places) > limit

        return await self.asked(listed)

    async def cancel(self, tenant: str, id: str) -> BatchRecord:
        """Raises UnknownObject, RequestError where it has ended, StoreUnavailable."""
        record = await self.batch(tenant, id)
        place = self._store.place(tenant, id)
        if not await self.asked(lambda: self._store.cancel(place, at=int(time.time()))):
            record = await self.batch(tenant, id)
            if record.status != "cancelled":
                raise RequestError(f"batch {id} is {record.status}: there is nothing left to cancel")
        return await self.batch(tenant, id)

    def start(self, tasks: Supervisor) -> None:
        """Work on batches, until this is closed."""
        self._task = tasks.start("batches", self._run_forever)

    async def _run_forever(self) -> None:
        """As many at a time as are of different tenants; and take out what has ended."""
        assert self._door
        working = Working(
            store=self._store,
            bounds=self._bounds,
            door=self._door,
            client_of=self._client_of,
            slots=asyncio.Semaphore(self._at_a_time),
            at_a_time=self._at_a_time,
            lease_s=self._lease_s,
        )
        swept_at = time.monotonic() - _SWEEP_S
        while True:
            self._has_come.clear()
            try:
                while len(self._jobs) < _MAX_JOBS and await self._begin_one(working):
                    pass
                if time.monotonic() - swept_at >= _SWEEP_S:
                    await self._store.sweep()
                    swept_at = time.monotonic()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            if is_cancelled():
                return
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._has_come.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        """Leave what this router works on to the others, at once."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        jobs = dict(self._jobs)
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for _, place, token in jobs.values():
            try:
                await self._store.release(place, token)
            except RedisError as error:
                self._reach.missed(error)  # its lease ends by itself
        await self._redis.aclose()

    async def _begin_one(self, working: Working) -> bool:
        """Whether there was one."""
        token = secrets.token_hex(16)
        tenants = {job.tenant for job, _, _ in self._jobs.values()}
        place = await self._store.claim(token, lease_s=self._lease_s, tenants=tenants)
        if place is None:
            return False
        record = await self._store.batch(place)
        if record is None:
            logger.error("a batch whose record is not this deployment's is left alone")
            return False
        job = BatchJob(working, place, token, record)
        task = asyncio.create_task(job.run())
        self._jobs[task] = job, place, token
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        self._has_come.set()
        if not task.cancelled() and (error := task.exception()):
            logger.error("work on a batch failed by a bug; it is taken up again", exc_info=error)

    def check_room(self, told: str) -> None:
        """Raises RequestError or CapacityError where there is none."""
        if told == "tenant":
            most = self._bounds.max_of_tenant
            text = f"your files and answers of batches have the {most} bytes that they may; delete files"
            raise RequestError(text, param="file")
        if told == "all":
            raise CapacityError("there is no room for more batches at present", retry_after_s=60.0)

    async def asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises StoreUnavailable."""
        try:
            return await ask()
        except RedisError as error:
            logger.warning("Redis does not answer for batches: %s", error)
            raise _away() from None


class NewFile:
    """A file while it is sent: nobody sees it before its end."""

    def __init__(self, batches: Batches, store: RedisBatches, tenant: str, bounds: BatchBounds) -> None:
        self.id = new_file_id()
        self._batches = batches
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
        told = await self._batches.asked(lambda: self._store.put_file(self._place, record, keep_s=kept_s))
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
        self._batches.check_room(await self._batches.asked(lambda: self._store.put_part(self._place, number, part)))


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def _unknown(what: str, id: str, param: str | None) -> UnknownObject:
    return UnknownObject(f"{param or what}: there is no {what} {id[:_MAX_TOLD]!r}", param=param)


def _away() -> StoreUnavailable:
    return StoreUnavailable("where batches are kept cannot be reached at present; try again in a moment")
