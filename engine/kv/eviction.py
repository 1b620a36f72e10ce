"""Which cached block gives its space away.

Most blocks of a prompt are never asked for again, and a plain LRU throws out the rest to keep them. `ReuseValue` sorts
blocks into kinds that behave alike, learns how soon each kind is used again, and lets go of what is worth least.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from core.spec.plugin import find, made
from engine.kv.reuse_history import ReuseHistory


class Origin(IntEnum):
    """How a block came to be: what is known of it before anyone has asked for it again."""

    FIRST = 0  # of a prompt of which nothing, or only what everyone begins with, was known
    CONTINUED = 1  # of a prompt that goes on where an earlier one ended
    GENERATED = 2  # of an answer


class Eviction(Protocol):
    """The order in which cached blocks are given up. Owned by a block manager, and by its thread."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def origin_after(self, parent: bytes | None) -> Origin:
        """The origin of a prompt's new blocks, `parent` being the last block of it that was known."""
        ...

    def full(self, prefix_hash: bytes) -> None:
        """A block with this content was computed, or computed again."""
        ...

    def restored(self, prefix_hash: bytes) -> None:
        """A block with this content came from elsewhere; it is `used` as soon as it is asked for."""
        ...

    def used(self, block: int, prefix_hash: bytes) -> None:
        """A sealed block was found and is held, perhaps by one more; it is no candidate (any more)."""
        ...

    def add(self, block: int, prefix_hash: bytes, origin: Origin) -> None:
        """A sealed block is held by nobody: a candidate from now on."""
        ...

    def spare(self, block: int) -> None:
        """Another replica holds this candidate's content too: let it go early."""
        ...

    def forget(self, prefix_hash: bytes) -> None:
        """A block that is held has lost its content."""
        ...

    def pop(self) -> int:
        """Give up one candidate. Raises KeyError when there is none."""
        ...


class LeastRecentlyUsed:
    """The one that was held last stays longest."""

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


# The kinds: one for each origin as long as nobody has asked for the block again, and then
_USED_ONCE = len(Origin)
_USED_OFTEN = _USED_ONCE + 1
_NUM_KINDS = _USED_OFTEN + 1
_SPARE = _NUM_KINDS  # the queue of those that others hold too
_PRIOR = [1.0, 0.5, 0.5, 2.0, 4.0]  # of each kind to be used again, before anything is known

_POPULAR_USES = 8  # what was used so often is a common beginning, not somebody's conversation
_SAMPLE_BITS = 0x07  # one block in eight is watched to learn from; the hash decides
_LOOK_EVERY = 16  # so many are given up before the queues are compared again
_KEEP = 0.9  # of what was learnt, at each learning


class _Past:
    """What became of one prefix hash, whether its block is here or not."""

    __slots__ = ("kind", "since_s", "uses")

    def __init__(self, kind: int, since_s: float) -> None:
        self.kind = kind
        self.since_s = since_s  # when it was last let go
        self.uses = 0


class ReuseValue:
    """Gives up the block whose Gittins index is least; see `engine.kv.reuse_history`.

    Within a kind the oldest goes first, so only the heads of a few queues are compared. Blocks that were given up are
    remembered for a while (`num_ghosts` of them, some 250 bytes each): one that comes back counts as used.
    `clock` returns seconds.
    """

    def __init__(self, *, num_ghosts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._history = ReuseHistory(_PRIOR)
        self._queues: list[OrderedDict[int, bytes]] = [OrderedDict() for _ in range(_NUM_KINDS + 1)]
        self._queue_of: dict[int, int] = {}  # candidate -> its queue
        self._past: dict[bytes, _Past] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._max_ghosts = num_ghosts
        self._victims = 0  # the queue that gives
        self._pops_left = 0  # until the queues are compared again
        self._adds_left = 256  # until we learn; it doubles up to the size of the memory

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
        """The queue whose oldest block is worth least."""
        if self._queues[_SPARE]:
            return _SPARE
        now = self._clock()
        heads = [(kind, next(iter(queue.values()))) for kind, queue in enumerate(self._queues) if queue]
        if not heads:
            raise KeyError("nothing is cached")
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


_GHOSTS = 2  # evicted blocks remembered, for each one held
_MAX_GHOSTS = 200_000  # some 50 MB


class MakeEviction(Protocol):
    """What a name in EVICTIONS stands for: a class, or a function that returns an Eviction."""

    def __call__(self, *, num_blocks: int, clock: Callable[[], float]) -> Eviction:
        """num_blocks: of the manager that will own it. clock: seconds; simulated ones in the simulator."""
        ...


EVICTIONS: dict[str, MakeEviction] = {
    "reuse_value": lambda *, num_blocks, clock: ReuseValue(
        num_ghosts=min(_GHOSTS * num_blocks, _MAX_GHOSTS), clock=clock
    ),
    "lru": lambda *, num_blocks, clock: LeastRecentlyUsed(),
}


def make_eviction(name: str, *, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> Eviction:
    """By its name in EVICTIONS, or MODULE:NAME. Raises SpecError."""
    return made(name, find(name, EVICTIONS), num_blocks=num_blocks, clock=clock)
