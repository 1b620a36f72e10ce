"""The prefix index: which replica holds which block. A hint, never a promise: the holder has the last word.

    <name>:events             stream of what each replica stored and removed; routers follow it
    <name>:blocks:<replica>   set of the hashes that a replica holds, for a router that starts or has missed events

Both are written in one pipeline, hashes packed 16 bytes each. A replica's set dies with its lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cluster.hashing import HASH_BYTES

_MAX_EVENTS = 100_000  # of the stream, roughly; who has missed more reads the sets instead
_SET_TTL_S = 60
_LONG = 256  # blocks of a prefix in which not each is looked at


class PrefixIndex:
    """Hash to holders, in memory. Matching costs a dictionary look-up per block, or fewer where the prefix is long.

    Each replica is one bit. A replica that is dropped loses its bit at once, without a walk over its blocks; entries
    that nobody alive holds are swept when they outnumber the others.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._bits: dict[str, int] = {}
        self._next_bit = 0
        self._alive = 0
        self._expected: dict[str, set[bytes]] = {}  # what is stored here already, though it is yet to be computed

    def __len__(self) -> int:
        return len(self._holders)

    def store(self, replica: str, hashes: Iterable[bytes]) -> None:
        """`replica` holds these blocks."""
        if expected := self._expected.get(replica):
            hashes = list(hashes)
            expected.difference_update(hashes)
        bit = self._bit(replica)
        for prefix_hash in hashes:
            self._holders[prefix_hash] = self._holders.get(prefix_hash, 0) | bit

    def remove(self, replica: str, hashes: Iterable[bytes]) -> None:
        """`replica` no longer holds these blocks."""
        bit = self._bit(replica)
        for prefix_hash in hashes:
            if holders := self._holders.get(prefix_hash, 0) & ~bit & self._alive:
                self._holders[prefix_hash] = holders
            else:
                self._holders.pop(prefix_hash, None)

    def expect(self, replica: str, hashes: Sequence[bytes]) -> None:
        """`replica` was given a prompt of these blocks: whoever comes meanwhile may count on them.

        When that prompt is done with, `settle` it.
        """
        bit = self._bit(replica)
        new = [prefix_hash for prefix_hash in hashes if not self._holders.get(prefix_hash, 0) & bit]
        self.store(replica, new)
        self._expected.setdefault(replica, set()).update(new)

    def settle(self, replica: str, hashes: Iterable[bytes]) -> None:
        """What was expected of these blocks and has not come is forgotten; what came has been stored."""
        if expected := self._expected.get(replica):
            missing = expected.intersection(hashes)
            expected -= missing
            self.remove(replica, missing)

    def drop(self, replica: str) -> None:
        """`replica` is gone, or starts again with nothing."""
        self._expected.pop(replica, None)
        if bit := self._bits.pop(replica, None):
            self._alive &= ~bit
            if not self._alive:
                self._holders.clear()
            elif len(self._bits) * 2 < self._next_bit:
                self._sweep()

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of the prefix each replica holds; replicas that hold none are left out.

        Where a replica drops out of a long prefix is found by bisection: who holds a block has nearly always what comes
        before it, for tails are evicted before heads.
        """
        if not self._alive or not hashes:
            return {}
        walk = self._bisect if len(hashes) > _LONG else self._walk
        depths = walk(hashes, self._alive)
        return {replica: depth for replica, bit in self._bits.items() for mask, depth in depths if mask & bit}

    def _walk(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """Look at every block: (replicas, how many leading blocks they hold)."""
        depths: list[tuple[int, int]] = []
        for depth, prefix_hash in enumerate(hashes):
            holding = self._holders.get(prefix_hash, 0) & walking
            if holding != walking:
                if depth:
                    depths.append((walking & ~holding, depth))
                walking = holding
                if not walking:
                    return depths
        return [*depths, (walking, len(hashes))]

    def _bisect(self, hashes: Sequence[bytes], walking: int) -> list[tuple[int, int]]:
        """As `_walk`, but look only where somebody drops out: between two blocks that are held by others."""
        depths: list[tuple[int, int]] = []
        last = len(hashes) - 1
        walking &= self._holders.get(hashes[0], 0)
        spans = [(0, last, self._holders.get(hashes[last], 0))]  # (of the first block, of the last, who holds that one)
        while spans and walking:  # the leftmost span comes next; all that walk hold its first block
            low, high, holding = spans.pop()
            if not walking & ~holding:
                continue
            if high - low == 1:
                depths.append((walking & ~holding, high))
                walking &= holding
                continue
            middle = (low + high) // 2
            spans.append((middle, high, holding))
            spans.append((low, middle, self._holders.get(hashes[middle], 0)))
        return [*depths, (walking, len(hashes))] if walking else depths

    def _bit(self, replica: str) -> int:
        if replica not in self._bits:
            self._bits[replica] = 1 << self._next_bit
            self._alive |= self._bits[replica]
            self._next_bit += 1
        return self._bits[replica]

    def _sweep(self) -> None:
        """Renumber the bits of those alive from 0 and forget what only the dead held."""
        old_bits = list(self._bits.values())
        self._bits = {replica: 1 << i for i, replica in enumerate(self._bits)}
        self._next_bit = len(self._bits)
        self._alive = (1 << self._next_bit) - 1
        self._holders = {
            prefix_hash: sum(1 << i for i, bit in enumerate(old_bits) if holders & bit)
            for prefix_hash, holders in self._holders.items()
            if any(holders & bit for bit in old_bits)
        }


class IndexWriter:
    """One replica's entries. Raises redis.RedisError when Redis is away; then `reset` makes it whole again."""

    def __init__(self, redis: Redis, *, name: str, replica: str) -> None:
        self._redis = redis
        self._events = f"{name}:events"
        self._blocks = f"{name}:blocks:{replica}"
        self._replica = replica

    async def publish(self, *, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Make known what has changed. No hash is in both."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            if stored:
                pipeline.sadd(self._blocks, *stored)
            if removed:
                pipeline.srem(self._blocks, *removed)
            pipeline.expire(self._blocks, _SET_TTL_S)
            event: dict[Any, Any] = {"replica": self._replica, "stored": b"".join(stored), "removed": b"".join(removed)}
            pipeline.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)
            await pipeline.execute()

    async def reset(self, hashes: Sequence[bytes]) -> None:
        """Start again from exactly these blocks; with none, the replica leaves the index."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._blocks)
            if hashes:
                pipeline.sadd(self._blocks, *hashes)
                pipeline.expire(self._blocks, _SET_TTL_S)
            event: dict[Any, Any] = {"replica": self._replica, "reset": b"1", "stored": b"".join(hashes)}
            pipeline.xadd(self._events, event, maxlen=_MAX_EVENTS, approximate=True)
            await pipeline.execute()

    async def renew(self) -> None:
        await self._redis.expire(self._blocks, _SET_TTL_S)


class IndexReader:
    """Keeps a PrefixIndex as Redis has it. Raises redis.RedisError when Redis is away; the index stays as it was."""

    def __init__(self, redis: Redis, index: PrefixIndex, *, name: str) -> None:
        self._redis = redis
        self._index = index
        self._events = f"{name}:events"
        self._blocks = f"{name}:blocks:"
        self._last_id: bytes | None = None  # of the last event folded in; None: nothing yet
        self._position = 0  # how many events the stream had had when that one was added

    async def follow(self, replicas: Iterable[str], *, wait_ms: int) -> None:
        """Fold in what is new, waiting up to wait_ms for it. If events were missed, `load` the replicas first."""
        num_added, num_trimmed, newest_id = await self._stream()
        if self._last_id is None or num_trimmed > self._position:
            self._last_id, self._position = newest_id, num_added
            await self.load(replicas)
        elif num_added < self._position or _is_before(newest_id, self._last_id):
            # Redis began anew. What we know holds until each replica has written all that it has again.
            self._last_id, self._position = b"0-0", 0
        streams: dict[Any, Any] = {self._events: self._last_id}
        answer: Any = await self._redis.xread(streams, count=1000, block=wait_ms)
        for _, events in answer or []:
            for event_id, event in events:
                self._fold(event)
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
        """Read all that these replicas hold: for those that were there before this reader."""
        for replica in replicas:
            hashes: Any = await self._redis.smembers(self._blocks + replica)
            self._index.drop(replica)
            self._index.store(replica, hashes)

    def _fold(self, event: dict[bytes, bytes]) -> None:
        replica = event[b"replica"].decode()
        if b"reset" in event:
            self._index.drop(replica)
        self._index.store(replica, _unpack(event.get(b"stored", b"")))
        self._index.remove(replica, _unpack(event.get(b"removed", b"")))


def _is_before(one: bytes, other: bytes) -> bool:
    """Of two ids in a stream, "milliseconds-number"."""
    return [int(part) for part in one.split(b"-")] < [int(part) for part in other.split(b"-")]


def _unpack(packed: bytes) -> list[bytes]:
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
