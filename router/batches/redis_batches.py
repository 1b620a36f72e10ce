"""Batches and their files in the deployment's Redis, for all of its routers.

    <name>:offline:file:<tenant>:<id>    hash: record (sealed; none while it is sent or written), bytes, size
    <name>:offline:data:<tenant>:<id>    hash: number -> part (sealed), to be read in the order of numbers
    <name>:offline:files:<tenant>        sorted set of the files that have a record, by when they were made
    <name>:offline:batch:<tenant>:<id>   hash: record, state (both sealed), completed, failed, size, cancel, lease
    <name>:offline:batches:<tenant>      sorted set of batches, by when they were made
    <name>:offline:open                  sorted set of batches to be worked on, by when the lease of each ends
    <name>:offline:ends                  sorted set of files and batches, by when they go
    <name>:offline:bytes                 hash: what each tenant has, and `all`

Tenants and ids are keyed hashes here, as those of stored responses are. Nothing of this expires by itself: a server
that evicts what expires (core/index/key_channel.py) passes it over, and the routers take out what has ended.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from redis.asyncio import Redis

from core.identity.keyed_hash import keyed_hash
from core.identity.signing import signed, verified
from router.batches import scripts
from router.batches.bounds import ENTRY_BYTES, PART_BYTES, BatchBounds
from router.batches.records import BatchMade, BatchRecord, BatchState, FileRecord

T = TypeVar("T", FileRecord, BatchMade, BatchState)

PENDING_S = 900.0  # a file that is being sent goes so long after its latest part
_RECORD, _STATE = -1, -2  # what a seal is of, where it is of no part
READ_BYTES = 2**20  # of one answer of Redis, about
_SWEPT_AT_ONCE = 20


class HashedPlace(NamedTuple):
    """Where something is: keyed hashes of its tenant, and of its id among that tenant's."""

    tenant: str
    id: str


class RedisBatches:
    """Raises redis.RedisError where Redis is away. What is told as a word: `put`, or why not (`tenant`, `all`: full;
    `many`; `unknown`; `lost`: somebody else has the lease)."""

    def __init__(self, redis: Redis, bounds: BatchBounds, *, name: str, key: bytes) -> None:
        """key: of the deployment's, for names and seals."""
        self._redis = redis
        self._bounds = bounds
        self._name = name
        self._key = key
        self._tables = [f"{name}:offline:{table}" for table in ("bytes", "ends", "open")]
        self._scripts: dict[str, Any] = {}

    def place(self, tenant: str, id: str) -> HashedPlace:
        return HashedPlace(self._hashed(tenant), self._hashed(tenant, id))

    async def put_part(self, file: HashedPlace, number: int, part: bytes) -> str:
        """Of a file that has no record yet."""
        signed = self._sealed(file, number, part)
        pending_ms = round(PENDING_S * 1e3)
        counted = len(part) + PART_BYTES
        return await self._run(scripts.PUT_PART, *file, number, signed, len(part), counted, pending_ms, *self._most)

    async def put_file(self, file: HashedPlace, record: FileRecord, *, keep_s: float) -> str:
        """Its parts are all there."""
        signed, keep_ms = self._encoded(file, _RECORD, record), round(keep_s * 1e3)
        return await self._run(scripts.PUT_FILE, *file, signed, keep_ms, ENTRY_BYTES, self._bounds.max_files)

    async def file(self, file: HashedPlace) -> FileRecord | None:
        found: Any = await self._redis.hget(self._at("file", file), "record")
        return self._decoded(file, _RECORD, found, FileRecord)

    async def num_bytes(self, file: HashedPlace) -> int:
        """Of one that has no record yet."""
        found: Any = await self._redis.hget(self._at("file", file), "bytes")
        return int(found or 0)

    async def numbers(self, file: HashedPlace) -> list[int]:
        """Of its parts, in order."""
        found: Any = await self._redis.hkeys(self._at("data", file))
        return sorted(int(number) for number in found)

    async def parts(self, file: HashedPlace, numbers: Sequence[int], *, part_bytes: int) -> AsyncIterator[bytes]:
        """part_bytes: of one, about. Ends early where one is gone, or is not what was put."""
        at_once = max(1, READ_BYTES // max(1, part_bytes))
        for begin in range(0, len(numbers), at_once):
            some = numbers[begin : begin + at_once]
            found: Any = await self._redis.hmget(self._at("data", file), [str(number) for number in some])
            for number, value in zip(some, found, strict=True):
                part = self._opened(file, number, value)
                if part is None:
                    return
                yield part

    async def drop_file(self, file: HashedPlace) -> bool:
        """Whether there was one, with a record."""
        return bool(int(await self._run(scripts.DROP, "file", *file)))

    async def listed(self, kind: str, tenant: str, *, after: str | None, is_newest_first: bool) -> list[HashedPlace]:
        """kind: files or batches. All of a tenant's, those that come after one of them: none, where there is no such
        one."""
        hashed = self._hashed(tenant)
        found: Any = await self._redis.zrange(f"{self._name}:offline:{kind}:{hashed}", 0, -1, desc=is_newest_first)
        places = [HashedPlace(hashed, id.decode()) for id in found]
        if after is None:
            return places
        begin = next((n for n, place in enumerate(places, 1) if place == self.place(tenant, after)), len(places))
        return places[begin:]

    async def create(self, batch: HashedPlace, made: BatchMade, *, input_file: HashedPlace, keep_input_s: float) -> str:
        signed, keep_ms = self._encoded(batch, _RECORD, made), round(keep_input_s * 1e3)
        most = self._bounds.max_batches, *self._most
        return await self._run(scripts.CREATE, *batch, signed, input_file.id, keep_ms, ENTRY_BYTES, *most)

    async def batch(self, batch: HashedPlace) -> BatchRecord | None:
        wanted = ["record", "state", "completed", "failed", "cancel"]
        made, state, completed, failed, cancel = await self._redis.hmget(self._at("batch", batch), wanted)
        if (known := self._decoded(batch, _RECORD, made, BatchMade)) is None:
            return None
        return BatchRecord(
            made=known,
            state=self._decoded(batch, _STATE, state, BatchState) or BatchState(),
            num_completed=int(completed or 0),
            num_failed=int(failed or 0),
            cancelling_at=int(cancel) if cancel else None,
        )

    async def cancel(self, batch: HashedPlace, *, at: int) -> bool:
        """Whether it is open. at: unix seconds, for whoever looks."""
        return bool(int(await self._run(scripts.CANCEL, *batch, at)))

    async def claim(self, token: str, *, lease_s: float, tenants: Iterable[str]) -> HashedPlace | None:
        """One to be worked on by whoever has `token`, of none of these tenants (as they are hashed)."""
        found = await self._call(scripts.CLAIM, token, round(lease_s * 1e3), *tenants)
        return HashedPlace(*(part.decode() for part in found)) if found else None

    async def renew(self, batch: HashedPlace, token: str, *, lease_s: float) -> str:
        """`held`, `cancel` where it is held and to be cancelled, or `lost`."""
        return await self._run(scripts.RENEW, *batch, token, round(lease_s * 1e3))

    async def release(self, batch: HashedPlace, token: str) -> None:
        """Somebody else may have it at once."""
        await self._call(scripts.RELEASE, *batch, token)

    async def set_state(self, batch: HashedPlace, token: str, state: BatchState) -> str:
        return await self._run(scripts.SET_STATE, *batch, token, self._encoded(batch, _STATE, state))

    async def record(
        self, batch: HashedPlace, token: str, made: BatchMade, *, line: int, answer: bytes, is_error: bool
    ) -> str:
        """The one answer to a line: also `put` where it has one already, which stays."""
        files = [self.place(made.tenant, id) for id in (made.output_file_id, made.error_file_id)]
        if is_error:
            files.reverse()
        file, other = files
        signed, counted = self._sealed(file, line, answer), len(answer) + PART_BYTES
        which = "failed" if is_error else "completed"
        where = *batch, token, file.id, other.id
        return await self._run(scripts.RECORD, *where, line, signed, len(answer), counted, which, *self._most)

    async def finish(
        self, batch: HashedPlace, token: str, state: BatchState, files: Sequence[FileRecord], tenant: str
    ) -> str:
        """It has ended so; these files can be asked for from now on."""
        told = list[bytes | str]()
        for record in files:
            file = self.place(tenant, record.id)
            told += [file.id, self._encoded(file, _RECORD, record)]
        keep_ms = round(self._bounds.keep_s * 1e3)
        signed = self._encoded(batch, _STATE, state)
        return await self._run(scripts.FINISH, *batch, token, signed, keep_ms, ENTRY_BYTES, *told)

    async def sweep(self) -> None:
        """Take out what has ended."""
        while int(await self._run(scripts.SWEEP, _SWEPT_AT_ONCE)) == _SWEPT_AT_ONCE:
            pass

    @property
    def _most(self) -> tuple[int, int]:
        return self._bounds.max_of_tenant, self._bounds.max_bytes

    async def _run(self, script: str, *args: bytes | str | int) -> str:
        """What is told, as a word."""
        told = await self._call(script, *args)
        return told.decode() if isinstance(told, bytes) else str(told)

    async def _call(self, script: str, *args: bytes | str | int) -> Any:
        if script not in self._scripts:
            self._scripts[script] = self._redis.register_script(script)
        return await self._scripts[script](keys=self._tables, args=[self._name, *args])

    def _at(self, kind: str, place: HashedPlace) -> str:
        return f"{self._name}:offline:{kind}:{place.tenant}:{place.id}"

    def _encoded(self, place: HashedPlace, what: int, record: FileRecord | BatchMade | BatchState) -> bytes:
        return self._sealed(place, what, msgspec.json.encode(record))

    def _decoded(self, place: HashedPlace, what: int, signed: object, kind: type[T]) -> T | None:
        """None where it is not there, or not by this deployment."""
        value = self._opened(place, what, signed)
        return None if value is None else msgspec.json.decode(value, type=kind)

    def _sealed(self, place: HashedPlace, what: int, value: bytes) -> bytes:
        return signed(value, self._key, *_words(place, what))

    def _opened(self, place: HashedPlace, what: int, found: object) -> bytes | None:
        if not isinstance(found, bytes):
            return None
        return verified(found, self._key, *_words(place, what))

    def _hashed(self, *words: str) -> str:
        return keyed_hash(self._key, *words, person=b"batches")


def _words(place: HashedPlace, what: int) -> tuple[bytes, bytes]:
    return "".join(place).encode(), struct.pack("<q", what)
