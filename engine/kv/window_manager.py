"""Parts of KV blocks in layers with an attention window: allocation, and a cache for later prefix hits.

A block holds block_size tokens of all layers. Its part is its storage in the layers with a window; see
KVPool.window_of. A block gets a part before a step computes positions of it, or a transfer receives them:

    none ──attach──> held ──drop, block has a hash──> cached ──hold──> held
     ▲                └──drop, block has none──┐        │ least recently used, or the block loses its hash
     └─────────────────────────────────────────┴────────┘

Invariant: between steps, no more parts are held than are reserved. During a step more may be held: at most those that
are set aside for its tokens. So no step lacks a part.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from core.model.kv_memory import first_seen, least_parts, most_parts, reservable_parts, window_span

# Changes of KVPool.window_of: block, part. Part 0 stands for none; it stays zero.
PartChanges = list[tuple[int, int]]


class WindowManager:
    """Allocator of parts, and cache of those that no sequence needs. Owned by the step thread, inside a BlockManager.

    Holders are sequences whose later queries see the block, and transfers that read or write it. Each reserves as many
    parts as it ever holds between steps; admission waits until the reservation fits. Parts for the tokens of the
    largest step are set aside, because a chunk of a prompt needs them until it is computed.
    """

    def __init__(self, num_parts: int, *, num_blocks: int, window: int, block_size: int, max_batch_tokens: int) -> None:
        """num_parts: parts of the pool, part 0 included. window: tokens. max_batch_tokens: limit of a step."""
        self.window = window
        self.block_size = block_size
        self.span = window_span(window, block_size)
        # Called with a block. Returns its hash; only the parts of blocks with one are cached. Set by the BlockManager.
        self.hash_of: Callable[[int], bytes | None] = lambda block: None
        # Called with (part, hash of its block) before an evicted part is overwritten.
        self.on_evict: Callable[[int, bytes], None] = lambda part, prefix_hash: None
        self.num_parts = num_parts
        self.num_reserved = 0
        self.max_batch_tokens = max_batch_tokens
        reservable = reservable_parts(
            num_parts, num_blocks=num_blocks, block_size=block_size, max_batch_tokens=max_batch_tokens
        )
        self.num_reservable = 1 << 62 if reservable is None else reservable
        least = least_parts(window=window, block_size=block_size, max_batch_tokens=max_batch_tokens)
        assert num_parts >= min(num_blocks + 1, least), f"{num_parts} parts do not hold the largest sequence"
        self._part_of: dict[int, int] = {}
        self._free: deque[int] = deque(range(1, num_parts))
        # Number of holders by block; a block may be held before its part is attached.
        self._holders: dict[int, int] = {}
        # Blocks with a part and without holders, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._changes: dict[int, int] = {}
        # Hashes whose blocks got or lost a part, with True if they have one.
        self._found: dict[bytes, bool] = {}

    def __contains__(self, block: int) -> bool:
        """Return True if the block has a part."""
        return block in self._part_of

    def part_of(self, block: int) -> int | None:
        """Return the part of a block, if it has one."""
        return self._part_of.get(block)

    def first_seen(self, position: int) -> int:
        """Return the place in a table of the first block that the query at a position sees."""
        return first_seen(position, self.window, self.block_size)

    def num_for(self, num_tokens: int) -> int:
        """Return the parts to reserve for a sequence of up to `num_tokens`: one per block, at most `most_parts`."""
        return min(-(-num_tokens // self.block_size), most_parts(self.window, self.block_size))

    @property
    def num_unreserved(self) -> int:
        return self.num_reservable - self.num_reserved

    @property
    def num_held(self) -> int:
        return len(self._part_of) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Parts that `attach` can hand out."""
        return len(self._free) + len(self._cached)

    def seen_from(self, depth: int) -> range:
        """Return the places of the blocks that a query at the start of the block at place `depth` sees."""
        return range(max(0, depth - self.span), depth)

    def match(self, depth: int, has_part: Callable[[int], bool]) -> int:
        """Return the length of the longest prefix of up to `depth` blocks that a sequence can continue from.

        Every block that the query behind it sees must have a part. has_part: True if the block at a place has one.
        """
        while depth:
            missing = next((place for place in reversed(self.seen_from(depth)) if not has_part(place)), None)
            if missing is None:
                break
            # The query behind any prefix that is shorter, but includes this block, sees it, too.
            depth = missing
        return depth

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder of each block. The part that it has, or gets later, is kept until every holder drops it."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._cached.pop(block, None)

    def attach(self, blocks: Sequence[int]) -> None:
        """Add a holder of each block, and attach a part where there is none. The holder has reserved the parts."""
        self.hold(blocks)
        for block in blocks:
            if block not in self._part_of:
                assert self.hash_of(block) is None, f"the part of cached block {block} would be empty"
                if not self._free:
                    assert self._cached, "more parts are held than were reserved"
                    self.evict(next(iter(self._cached)))
                self._part_of[block] = self._changes[block] = self._free.popleft()

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block. A part without holders is cached if the block has a hash, else free."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            del self._holders[block]
            if block in self._part_of:
                if self.hash_of(block) is not None:
                    self._cached[block] = None
                else:
                    self._detach(block)

    def evict(self, block: int) -> None:
        """Free a cached part after `on_evict`, which may save its content. No-op if the block has none."""
        if block in self._cached:
            prefix_hash = self.hash_of(block)
            assert prefix_hash is not None
            self.on_evict(self._part_of[block], prefix_hash)
            del self._cached[block]
            self._detach(block)

    def hashed(self, block: int, prefix_hash: bytes) -> None:
        """Record that a block has got a hash."""
        if block in self._part_of:
            self._found[prefix_hash] = True

    def forget(self, block: int, prefix_hash: bytes) -> None:
        """Free the part of a block that has lost its hash, unless it is held."""
        if block in self._part_of:
            self._found[prefix_hash] = False
        if block in self._cached:
            del self._cached[block]
            self._detach(block)

    def quarantine(self, block: int) -> None:
        """Keep the part of a held block until `release`, because a peer may still write to it.

        Takes over one of the block's holders. No-op if it has none.
        """
        if block in self._holders:
            self._quarantined.add(block)
            self.num_reserved += 1

    def release(self, block: int) -> None:
        """Drop the holder that `quarantine` took over."""
        if block in self._quarantined:
            self._quarantined.remove(block)
            self.num_reserved -= 1
            self.drop([block])

    def take_changes(self) -> PartChanges:
        """Return and clear the changes that every rank must make before the next step."""
        changes, self._changes = self._changes, {}
        return list(changes.items())

    def take_found(self) -> dict[bytes, bool]:
        """Return and clear the hashes whose blocks got or lost a part since the last call; True: the block has one."""
        found, self._found = self._found, {}
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError unless every part is free, held or cached, and belongs to one block."""
        parts = [*self._free, *self._part_of.values()]
        assert sorted(parts) == list(range(1, self.num_parts)), f"parts lost or duplicated: {sorted(parts)}"
        held = self._part_of.keys() & self._holders.keys()
        assert self._cached.keys() == self._part_of.keys() - held, "a part is neither held nor cached"
        assert None not in map(self.hash_of, self._cached), "a cached part belongs to a block without a hash"
        assert all(count > 0 for count in self._holders.values()), "a block without holders is counted"
        assert self._quarantined <= self._holders.keys(), "a quarantined part is not held"
        assert self.num_reserved >= 0, "more reservations were returned than taken"

    def _detach(self, block: int) -> None:
        self._free.append(self._part_of.pop(block))
        self._changes[block] = 0
        if prefix_hash := self.hash_of(block):
            self._found[prefix_hash] = False


class HeldParts:
    """Consecutive blocks of one table whose parts a sequence or transfer holds. Empty if the model frees nothing."""

    def __init__(self) -> None:
        self.reserved = 0
        # Place in the table of the first of `blocks`.
        self.first = 0
        self.blocks: list[int] = []

    @property
    def end(self) -> int:
        """Place in the table after the last held block."""
        return self.first + len(self.blocks)

    def reserve(self, num_parts: int, windows: WindowManager) -> None:
        """Reserve parts, even if too few are left: a caller that can wait checks WindowManager.num_unreserved first."""
        self.reserved += num_parts
        windows.num_reserved += num_parts

    def hold(self, table: Sequence[int], first: int, end: int, windows: WindowManager) -> None:
        """Hold the blocks at places [first, end) of a table, and the parts that they have."""
        assert not self.blocks
        self.first, self.blocks = first, list(table[first:end])
        windows.hold(self.blocks)

    def attach(self, table: Sequence[int], places: range, windows: WindowManager) -> None:
        """Hold the blocks at these places of a table, and attach parts where there are none."""
        assert not self.blocks
        self.first = places.start
        self.extend(table, places.stop, windows)

    def extend(self, table: Sequence[int], end: int, windows: WindowManager) -> None:
        """Hold the blocks up to place `end` of the table, too, and attach parts where there are none."""
        if new := table[self.end : end]:
            windows.attach(new)
            self.blocks += new

    def keep(self, table: Sequence[int], windows: WindowManager) -> None:
        """Hold the blocks from place `self.end` of a table on. The sequence that fills them attaches their parts."""
        new = table[self.end :]
        windows.hold(new)
        self.blocks += new

    def advance(self, first: int, windows: WindowManager) -> None:
        """Drop the blocks before place `first` of the table."""
        if first > self.first:
            passed, self.blocks = self.blocks[: first - self.first], self.blocks[first - self.first :]
            self.first = first
            windows.drop(passed)

    def trim(self, end: int, windows: WindowManager) -> None:
        """Drop the blocks from place `end` on, because they leave the table."""
        if end < self.end:
            kept = max(0, end - self.first)
            removed, self.blocks = self.blocks[kept:], self.blocks[:kept]
            windows.drop(removed)

    def leave_out(self, blocks: Iterable[int]) -> None:
        """Remove blocks without dropping them: another holder takes over. Only `release` may follow."""
        removed = set(blocks)
        self.blocks = [block for block in self.blocks if block not in removed]

    def release(self, windows: WindowManager) -> None:
        """Drop all blocks and the reservation. Parts of the tail are evicted before those of the head."""
        windows.drop(reversed(self.blocks))
        windows.num_reserved -= self.reserved
        self.reserved, self.first, self.blocks = 0, 0, []
