"""Eviction policies for cached KV blocks.

Most prompt blocks are never reused, and plain LRU evicts the useful rest to keep them. `ReuseValue` sorts blocks into
kinds with similar reuse, learns how soon each kind is used again, and evicts the block with the lowest expected value.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from core.spec.plugin import find, made
from engine.kv.reuse_history import ReuseHistory


class Origin(IntEnum):
    """Origin of a block, which predicts its first reuse.

    FIRST: prompt block after an unknown or very common prefix. CONTINUED: prompt block that extends a known sequence.
    GENERATED: block of an answer.
    """

    FIRST = 0
    CONTINUED = 1
    GENERATED = 2


class Eviction(Protocol):
    """Order in which cached blocks are evicted. Owned by one block manager and its thread."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def origin_after(self, parent: bytes | None) -> Origin:
        """Return the origin of a prompt's new blocks. `parent` is the last known block of the prompt."""
        ...

    def full(self, prefix_hash: bytes) -> None:
        """Record that a block with this content was computed, possibly again."""
        ...

    def restored(self, prefix_hash: bytes) -> None:
        """Record that a block with this content came from elsewhere. Its first request calls `used`."""
        ...

    def used(self, block: int, prefix_hash: bytes) -> None:
        """Record a cache hit and remove the block from the candidates. It may already be held."""
        ...

    def add(self, block: int, prefix_hash: bytes, origin: Origin) -> None:
        """Make a block with a hash and no reference a candidate for eviction."""
        ...

    def spare(self, block: int) -> None:
        """Evict this candidate early: another replica holds its content too."""
        ...

    def forget(self, prefix_hash: bytes) -> None:
        """Record that a held block has lost its content."""
        ...

    def pop(self) -> int:
        """Evict one candidate and return it. Raises KeyError if there is none."""
        ...


class LeastRecentlyUsed:
    """Evict the block that was released longest ago."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._candidates)

    def __contains__(self, block: int) -> bool:
        return block in self._candidates

    def origin_after(self, parent: bytes | None) -> Origin:
        return Origin.FIRST

    def full(self, prefix_hash: bytes) -> None:
        pass

    def restored(self, prefix_hash: bytes) -> None:
        pass

    def used(self, block: int, prefix_hash: bytes) -> None:
        self._candidates.pop(block, None)

    def add(self, block: int, prefix_hash: bytes, origin: Origin) -> None:
        self._candidates[block] = None

    def spare(self, block: int) -> None:
        self._candidates.move_to_end(block, last=False)

    def forget(self, prefix_hash: bytes) -> None:
        pass

    def pop(self) -> int:
        return self._candidates.popitem(last=False)[0]


# Kinds: one per origin until the first reuse, then one for a single use and one for several.
_USED_ONCE = len(Origin)
_USED_OFTEN = _USED_ONCE + 1
_NUM_KINDS = _USED_OFTEN + 1
# Queue of the blocks that another replica also holds.
_SPARE = _NUM_KINDS
# Prior of each kind's reuse, relative to the average.
_PRIOR = [1.0, 0.5, 0.5, 2.0, 4.0]

# A block with this many uses belongs to a prefix common to many requests, not to one conversation.
_POPULAR_USES = 8
# Sample one block in eight for learning, selected by its hash.
_SAMPLE_BITS = 0x07
# Evictions between two comparisons of the queues.
_LOOK_EVERY = 16
# Share of the counts that survives each round of learning.
_KEEP = 0.9


@dataclass(slots=True)
class _Past:
    """Reuse record of one prefix hash, cached or evicted."""

    kind: int
    # Time of the last release.
    since_s: float
    uses: int = 0


class ReuseValue:
    """Evict the block with the lowest Gittins index; see `engine.kv.reuse_history`.

    Within a kind the oldest block goes first, so only the heads of a few queues are compared. `num_ghosts` evicted
    blocks are remembered (about 250 bytes each): one that returns counts as used. `clock` returns seconds.
    """

    def __init__(self, *, num_ghosts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._history = ReuseHistory(_PRIOR)
        self._queues: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(_NUM_KINDS + 1)]
        self._queue_of: dict[int, int] = {}  # candidate -> its queue
        self._past: dict[bytes, _Past] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._max_ghosts = num_ghosts
        # Queue that evictions are taken from.
        self._victims = 0
        # Evictions until the queues are compared again.
        self._pops_left = 0
        # Additions until the next round of learning; doubles up to the size of the memory.
        self._adds_left = 256

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, block: int) -> bool:
        return block in self._queue_of

    def origin_after(self, parent: bytes | None) -> Origin:
        past = self._past.get(parent) if parent else None
        return Origin.FIRST if past is None or past.uses >= _POPULAR_USES else Origin.CONTINUED

    def full(self, prefix_hash: bytes) -> None:
        if prefix_hash in self._ghosts:
            del self._ghosts[prefix_hash]
            self._count_use(prefix_hash)

    def restored(self, prefix_hash: bytes) -> None:
        if prefix_hash in self._ghosts:
            del self._ghosts[prefix_hash]
            self._count_use(prefix_hash)
            self._past[prefix_hash].uses -= 1

    def used(self, block: int, prefix_hash: bytes) -> None:
        queue = self._queue_of.pop(block, None)
        if queue is not None:
            del self._queues[queue][block]
            self._count_use(prefix_hash)
        else:
            self._past.setdefault(prefix_hash, _Past(Origin.FIRST, 0.0)).uses += 1

    def add(self, block: int, prefix_hash: bytes, origin: Origin) -> None:
        now = self._clock()
        past = self._past.get(prefix_hash)
        if past is None:
            past = self._past[prefix_hash] = _Past(origin, now)
        uses = past.uses
        past.kind = kind = int(origin) if not uses else _USED_ONCE if uses == 1 else _USED_OFTEN
        past.since_s = now
        self._queues[kind][block] = prefix_hash
        self._queue_of[block] = kind
        self._adds_left -= 1
        if self._adds_left <= 0:
            self._learn(now)

    def spare(self, block: int) -> None:
        prefix_hash = self._queues[self._queue_of[block]].pop(block)
        self._queue_of[block] = _SPARE
        self._queues[_SPARE][block] = prefix_hash

    def forget(self, prefix_hash: bytes) -> None:
        self._past.pop(prefix_hash, None)

    def pop(self) -> int:
        if self._pops_left <= 0 or not self._queues[self._victims]:
            self._victims = self._least()
            self._pops_left = _LOOK_EVERY
        self._pops_left -= 1
        block, prefix_hash = self._queues[self._victims].popitem(last=False)
        del self._queue_of[block]
        self._ghosts[prefix_hash] = None
        if len(self._ghosts) > self._max_ghosts:
            forgotten, _ = self._ghosts.popitem(last=False)
            past = self._past.pop(forgotten)
            if forgotten[0] & _SAMPLE_BITS == 0:
                self._history.lost(past.kind, self._clock() - past.since_s)
        return block

    def _least(self) -> int:
        """Return the queue whose oldest block has the lowest index."""
        if self._queues[_SPARE]:
            return _SPARE
        now = self._clock()
        heads = [(kind, next(iter(queue.values()))) for kind, queue in enumerate(self._queues) if queue]
        if not heads:
            raise KeyError("no cached block to evict")
        return min(heads, key=lambda head: self._history.index(head[0], now - self._past[head[1]].since_s))[0]

    def _count_use(self, prefix_hash: bytes) -> None:
        past = self._past[prefix_hash]
        past.uses += 1
        if prefix_hash[0] & _SAMPLE_BITS == 0:
            self._history.used(past.kind, self._clock() - past.since_s)

    def _learn(self, now: float) -> None:
        waiting = (
            (past.kind, now - past.since_s)
            for prefix_hash, past in self._past.items()
            if prefix_hash[0] & _SAMPLE_BITS == 0
        )
        self._history.learn(waiting, keep=_KEEP)
        self._adds_left = max(256, min(len(self._past), self._max_ghosts) // 2)


# Evicted blocks remembered per block held.
_GHOSTS = 2
# About 50 MB.
_MAX_GHOSTS = 200_000


class MakeEviction(Protocol):
    """Factory of an eviction policy: the type of the values in EVICTIONS."""

    def __call__(self, *, num_blocks: int, clock: Callable[[], float]) -> Eviction:
        """num_blocks: size of the manager that will own it. clock: seconds; simulated time in the simulator."""
        ...


EVICTIONS: dict[str, MakeEviction] = {
    "reuse_value": lambda *, num_blocks, clock: ReuseValue(
        num_ghosts=min(_GHOSTS * num_blocks, _MAX_GHOSTS), clock=clock
    ),
    "lru": lambda *, num_blocks, clock: LeastRecentlyUsed(),
}


def make_eviction(name: str, *, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> Eviction:
    """Create the policy registered under `name` in EVICTIONS, or imported from MODULE:NAME. Raises SpecError."""
    return made(name, find(name, EVICTIONS), num_blocks=num_blocks, clock=clock)
