"""The prefix index in Redis. A hint, never a promise: the holder has the last word.

    <name>:events                    stream of what replicas stored and removed, or that one began anew, for routers
    <name>:blocks:<replica>:<tier>   set of the hashes that a replica holds there, for routers that have missed events

Both are written in one pipeline, hashes packed 16 bytes each, some hundred to an event. Replica ids are never reused:
a dead replica's entries are forgotten with its name, and its sets die by themselves, or when a router sees it gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from core.index.prefix_index import PrefixIndex
from core.types.prefix_hash import HASH_BYTES
from core.types.tier import Tier

logger = logging.getLogger(__name__)

_MAX_EVENTS = 20_000  # of the stream, roughly: 160 MB at most; who has missed more reads the sets instead
_EVENT_BLOCKS = 512  # hashes in one event, 8 KiB at most
_RESET_BLOCKS = 4096  # hashes in one command that no event tells of
_SCAN_BLOCKS = 2048  # hashes that Redis looks at in one go
_SET_TTL_S = 60
_FIELDS: dict[Tier | None, str] = {None: "removed", **{tier: tier.name.lower() for tier in Tier}}  # of an event


class IndexWriter:
    """One replica's entries. Raises redis.RedisError when Redis is away; then `reset` makes it whole again."""

    def __init__(self, redis: Redis, *, name: str, replica: str) -> None:
        self._redis = redis
        self._events = f"{name}:events"
        self._sets = _set_names(name, replica)
        self._sizes = dict.fromkeys(Tier, 0)  # of the sets, as Redis has counted them
        self._replica = replica

    async def publish(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Make known where blocks are now; None: no longer here."""
        items = list(changes.items())
        for start in range(0, len(items), _EVENT_BLOCKS):
            await self._write(_by_tier(items[start : start + _EVENT_BLOCKS]))

    async def reset(self, held: Mapping[bytes, Tier]) -> None:
        """Start again from exactly these blocks; with none, the replica leaves the index."""
        self._sizes = dict.fromkeys(Tier, 0)
        await self._redis.unlink(*self._sets.values())
        items = list(held.items())
        for start in range(0, len(items), _RESET_BLOCKS):
            await self._write(_by_tier(items[start : start + _RESET_BLOCKS]), is_told=False)
        event: dict[Any, Any] = {"replica": self._replica, "reset": b"1"}
        await self._redis.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)

    async def renew(self) -> bool:
        """Keep the sets for another _SET_TTL_S. False: Redis has thrown some of it away; `reset` it."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in self._sets.values():
                pipeline.expire(name, _SET_TTL_S)
            is_there = await pipeline.execute()
        return all(there or not self._sizes[tier] for tier, there in zip(self._sets, is_there, strict=True))

    async def _write(self, blocks: Mapping[Tier | None, Sequence[bytes]], *, is_told: bool = True) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            changed: list[tuple[Tier, int]] = []  # which set each answer is of, and its sign
            for tier, name in self._sets.items():
                if self._sizes[tier] and (gone := [h for to, hashes in blocks.items() if to != tier for h in hashes]):
                    pipeline.srem(name, *gone)
                    changed.append((tier, -1))
                if hashes := blocks.get(tier):
                    pipeline.sadd(name, *hashes)
                    changed.append((tier, 1))
            for name in self._sets.values():
                pipeline.expire(name, _SET_TTL_S)
            if is_told:
                event: dict[Any, Any] = {_FIELDS[tier]: b"".join(hashes) for tier, hashes in blocks.items()}
                event["replica"] = self._replica
                pipeline.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)
            answers = await pipeline.execute()
        for (tier, sign), count in zip(changed, answers, strict=False):
            self._sizes[tier] += sign * count


class IndexReader:
    """Keeps a PrefixIndex as Redis has it. Raises redis.RedisError when Redis is away; the index stays as it was."""

    def __init__(self, redis: Redis, index: PrefixIndex, *, name: str) -> None:
        self._redis = redis
        self._index = index
        self._name = name
        self._events = f"{name}:events"
        self._last_id: bytes | None = None  # of the last event folded in; None: nothing yet
        self._position = 0  # how many events the stream had had when that one was added
        self._members: set[str] = set()  # of whom events are taken
        self._is_changing = asyncio.Lock()  # what is loaded is not older than what was folded in meanwhile
        self.num_rejected = 0  # events that make no sense

    async def follow(self, replicas: Iterable[str], *, wait_ms: int) -> None:
        """Fold in what is new of these replicas and of those that were loaded, waiting up to wait_ms for it. If events
        were missed, `load` the replicas first."""
        replicas = list(replicas)
        self._members.update(replicas)
        num_added, num_trimmed, newest_id = await self._stream()
        if self._last_id is None or num_trimmed > self._position:
            self._last_id, self._position = newest_id, num_added
            for replica in replicas:
                await self._load(replica)
        elif num_added < self._position or _is_before(newest_id, self._last_id):
            # Redis began anew. What we know holds until each replica has written all that it has again.
            self._last_id, self._position = b"0-0", 0
        streams: dict[Any, Any] = {self._events: self._last_id}
        answer: Any = await self._redis.xread(streams, count=1000, block=wait_ms)
        for _, events in answer or []:
            for event_id, event in events:
                try:
                    async with self._is_changing:
                        await self._fold(event)
                except (KeyError, ValueError, ResponseError) as error:  # the same event would only fail again
                    self._reject(event_id, error)
                self._last_id = event_id
                self._position += 1

    async def _stream(self) -> tuple[int, int, bytes]:
        """How many events were ever added, how many of them are trimmed away, and the id of the newest."""
        try:
            stream: Any = await self._redis.xinfo_stream(self._events)
        except ResponseError:  # no such key: nothing was ever published, or Redis began anew
            return 0, 0, b"0-0"
        return stream["entries-added"], stream["entries-added"] - stream["length"], stream["last-generated-id"]

    async def load(self, replicas: Iterable[str]) -> None:
        """Read all that these replicas hold: for those that were there before this reader, or that began anew.

        Other clients have their turn meanwhile. What changes meanwhile comes as an event afterwards.
        """
        for replica in replicas:
            self._members.add(replica)
            await self._load(replica)

    async def _load(self, replica: str) -> None:
        async with self._is_changing:
            if replica in self._members:  # it may have been forgotten meanwhile
                await self._read_sets(replica)

    async def _read_sets(self, replica: str) -> None:
        held = {}
        for tier, name in reversed(_set_names(self._name, replica).items()):  # the upper ones have the last word
            held[tier] = [prefix_hash async for prefix_hash in self._redis.sscan_iter(name, count=_SCAN_BLOCKS)]
        self._index.drop(replica)
        for tier, hashes in held.items():
            if hashes:
                self._index.store(replica, hashes, tier)

    async def forget(self, replica: str) -> None:
        """A replica's lease has ended: drop it here and in Redis, however much it held."""
        self._members.discard(replica)
        async with self._is_changing:  # not in the midst of being loaded
            self._index.drop(replica)
        await self._redis.unlink(*_set_names(self._name, replica).values())

    async def _fold(self, event: dict[bytes, bytes]) -> None:
        replica = event[b"replica"].decode()
        if replica not in self._members:  # whoever writes to Redis may invent any number of them
            return
        if b"reset" in event:
            await self._read_sets(replica)
            return
        for tier in Tier:
            if packed := event.get(_FIELDS[tier].encode()):
                self._index.store(replica, _unpack(packed), tier)
        self._index.remove(replica, _unpack(event.get(_FIELDS[None].encode(), b"")))

    def _reject(self, event_id: bytes, error: Exception) -> None:
        """Say it once: whoever writes one may write many."""
        if not self.num_rejected:
            logger.warning("event %s of the prefix index makes no sense and is left out: %r", event_id.decode(), error)
        self.num_rejected += 1


def _set_names(name: str, replica: str) -> dict[Tier, str]:
    return {tier: f"{name}:blocks:{replica}:{tier.name.lower()}" for tier in Tier}


def _by_tier(items: Iterable[tuple[bytes, Tier | None]]) -> dict[Tier | None, list[bytes]]:
    blocks: dict[Tier | None, list[bytes]] = {}
    for prefix_hash, tier in items:
        blocks.setdefault(tier, []).append(prefix_hash)
    return blocks


def _is_before(one: bytes, other: bytes) -> bool:
    """Of two ids in a stream, "milliseconds-number"."""
    return [int(part) for part in one.split(b"-")] < [int(part) for part in other.split(b"-")]


def _unpack(packed: bytes) -> list[bytes]:
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole hashes")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
