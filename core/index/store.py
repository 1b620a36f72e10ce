"""Prefix index in Redis. Entries are hints: the holder decides what it can serve.

    <name>:events                    stream of stored, removed and reset blocks per replica, for routers
    <name>:blocks:<replica>:<tier>   set of the hashes that a replica holds there, for routers that missed events

Both are written in one pipeline, with hashes packed to 16 bytes each, up to 512 per event. Replica ids are never
reused: a dead replica's sets expire, or the first router that misses the replica deletes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from core.index.prefix_index import PrefixIndex
from core.index.redis_client import repaired
from core.types.prefix_hash import HASH_BYTES
from core.types.tier import Tier

logger = logging.getLogger(__name__)

_MAX_EVENTS = 20_000  # of the stream, approximately: at most 160 MB; readers that missed more read the sets
_EVENT_BLOCKS = 512  # hashes per event, 8 KiB at most
_RESET_BLOCKS = 4096  # hashes per command without an event
_SCAN_BLOCKS = 2048  # hashes that Redis scans per call
_SET_TTL_S = 60
_NO_STREAM = "no such key"  # from the server's error message
_FIELDS: dict[Tier | None, str] = {None: "removed", **{tier: tier.name.lower() for tier in Tier}}  # fields of an event


class IndexWriter:
    """Writer of one replica's entries. Raises redis.RedisError if Redis is unreachable; call `reset` afterwards."""

    def __init__(self, redis: Redis, *, name: str, replica: str) -> None:
        self._redis = redis
        self._events = f"{name}:events"
        self._sets = _set_names(name, replica)
        self._types = {self._events: "stream", **dict.fromkeys(self._sets.values(), "set")}
        self._sizes = dict.fromkeys(Tier, 0)  # sizes of the sets, as counted by Redis
        self._replica = replica

    async def publish(self, changes: Mapping[bytes, Tier | None]) -> None:
        """Publish the new tier of each block; None: no longer held."""
        items = list(changes.items())
        for start in range(0, len(items), _EVENT_BLOCKS):
            await self._write(_by_tier(items[start : start + _EVENT_BLOCKS]))

    async def reset(self, held: Mapping[bytes, Tier]) -> None:
        """Replace all entries by exactly these blocks. With none, the replica leaves the index."""
        self._sizes = dict.fromkeys(Tier, 0)
        await self._redis.unlink(*self._sets.values())
        items = list(held.items())
        for start in range(0, len(items), _RESET_BLOCKS):
            await self._write(_by_tier(items[start : start + _RESET_BLOCKS]), has_event=False)
        event: dict[Any, Any] = {"replica": self._replica, "reset": b"1"}
        async with repaired(self._redis, self._types):
            await self._redis.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)

    async def renew(self) -> bool:
        """Extend the TTL of the sets to _SET_TTL_S. Returns False if Redis lost one of them: call `reset`."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            for name in self._sets.values():
                pipeline.expire(name, _SET_TTL_S)
            exists = await pipeline.execute()
        return all(found or not self._sizes[tier] for tier, found in zip(self._sets, exists, strict=True))

    async def _write(self, blocks: Mapping[Tier | None, Sequence[bytes]], *, has_event: bool = True) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            changed: list[tuple[Tier, int]] = []  # tier and sign of each counting command
            for tier, name in self._sets.items():
                if self._sizes[tier] and (gone := [h for to, hashes in blocks.items() if to != tier for h in hashes]):
                    pipeline.srem(name, *gone)
                    changed.append((tier, -1))
                if hashes := blocks.get(tier):
                    pipeline.sadd(name, *hashes)
                    changed.append((tier, 1))
            for name in self._sets.values():
                pipeline.expire(name, _SET_TTL_S)
            if has_event:
                event: dict[Any, Any] = {_FIELDS[tier]: b"".join(hashes) for tier, hashes in blocks.items()}
                event["replica"] = self._replica
                pipeline.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)
            async with repaired(self._redis, self._types):
                answers = await pipeline.execute()
        for (tier, sign), count in zip(changed, answers, strict=False):
            self._sizes[tier] += sign * count


class IndexReader:
    """Follower that keeps a PrefixIndex in sync with Redis. Raises redis.RedisError if Redis is unreachable; the index
    then keeps its state."""

    def __init__(self, redis: Redis, index: PrefixIndex, *, name: str) -> None:
        self._redis = redis
        self._index = index
        self._name = name
        self._events = f"{name}:events"
        self._last_id: bytes | None = None  # of the last applied event; None: none yet
        self._position = 0  # number of events that the stream had up to that one
        self._members: set[str] = set()  # replicas whose events are applied
        self._is_changing = asyncio.Lock()  # so that a load never overwrites newer events
        self.num_rejected = 0  # malformed events

    async def follow(self, replicas: Iterable[str], *, wait_ms: int) -> None:
        """Apply the new events of these and all loaded replicas; wait up to wait_ms for the first one.

        Loads `replicas` first if events were missed.
        """
        replicas = list(replicas)
        self._members.update(replicas)
        num_added, num_trimmed, newest_id = await self._stream()
        if self._last_id is None or num_trimmed > self._position:
            self._last_id, self._position = newest_id, num_added
            for replica in replicas:
                await self._load(replica)
        elif num_added < self._position or _is_before(newest_id, self._last_id):
            # Redis restarted empty. The index stays valid until each replica has written all its blocks again.
            self._last_id, self._position = b"0-0", 0
        streams: dict[Any, Any] = {self._events: self._last_id}
        answer: Any = await self._redis.xread(streams, count=1000, block=wait_ms)
        for _, events in answer or []:
            for event_id, event in events:
                try:
                    async with self._is_changing:
                        await self._fold(event)
                except (KeyError, ValueError, ResponseError) as error:  # skip it: it would fail every time
                    self._reject(event_id, error)
                self._last_id = event_id
                self._position += 1

    async def _stream(self) -> tuple[int, int, bytes]:
        """Return the number of events ever added, the number trimmed, and the id of the newest."""
        try:
            stream: Any = await self._redis.xinfo_stream(self._events)
        except ResponseError as error:
            if _NO_STREAM not in str(error):
                raise
            return 0, 0, b"0-0"  # nothing was published yet, or Redis restarted empty
        return stream["entries-added"], stream["entries-added"] - stream["length"], stream["last-generated-id"]

    async def load(self, replicas: Iterable[str]) -> None:
        """Read all blocks of these replicas. Needed if one is older than this reader or has restarted.

        Other Redis clients are served in between. Changes during the load arrive as events afterwards.
        """
        for replica in replicas:
            self._members.add(replica)
            await self._load(replica)

    async def _load(self, replica: str) -> None:
        async with self._is_changing:
            if replica in self._members:  # `forget` may have removed it while we waited
                await self._read_sets(replica)

    async def _read_sets(self, replica: str) -> None:
        held = {}
        for tier, name in reversed(_set_names(self._name, replica).items()):  # upper tiers win
            held[tier] = [prefix_hash async for prefix_hash in self._redis.sscan_iter(name, count=_SCAN_BLOCKS)]
        self._index.drop(replica)
        for tier, hashes in held.items():
            if hashes:
                self._index.store(replica, hashes, tier)

    async def forget(self, replica: str) -> None:
        """Drop a replica whose lease ended, here and in Redis."""
        self._members.discard(replica)
        async with self._is_changing:  # wait for a running load
            self._index.drop(replica)
        await self._redis.unlink(*_set_names(self._name, replica).values())

    async def _fold(self, event: dict[bytes, bytes]) -> None:
        replica = event[b"replica"].decode()
        if replica not in self._members:  # bounds the index: other writers of this Redis may invent replicas
            return
        if b"reset" in event:
            await self._read_sets(replica)
            return
        for tier in Tier:
            if packed := event.get(_FIELDS[tier].encode()):
                self._index.store(replica, _unpack(packed), tier)
        self._index.remove(replica, _unpack(event.get(_FIELDS[None].encode(), b"")))

    def _reject(self, event_id: bytes, error: Exception) -> None:
        """Count a malformed event. Logged once only: an attacker may write many."""
        if not self.num_rejected:
            logger.warning("ignored malformed event %s of the prefix index: %r", event_id.decode(), error)
        self.num_rejected += 1


def _set_names(name: str, replica: str) -> dict[Tier, str]:
    return {tier: f"{name}:blocks:{replica}:{tier.name.lower()}" for tier in Tier}


def _by_tier(items: Iterable[tuple[bytes, Tier | None]]) -> dict[Tier | None, list[bytes]]:
    blocks: dict[Tier | None, list[bytes]] = {}
    for prefix_hash, tier in items:
        blocks.setdefault(tier, []).append(prefix_hash)
    return blocks


def _is_before(one: bytes, other: bytes) -> bool:
    """Compare two ids of a stream, "milliseconds-number"."""
    return [int(part) for part in one.split(b"-")] < [int(part) for part in other.split(b"-")]


def _unpack(packed: bytes) -> list[bytes]:
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a multiple of the hash size, {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
