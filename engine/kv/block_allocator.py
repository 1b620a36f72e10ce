"""Block allocator with a prefix cache: reference counts of blocks, and an index of blocks with known content."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from engine.kv.eviction import Eviction, LeastRecentlyUsed, Origin

# Lifecycle of a block:
#
#     free ──allocate──> held ──free, no hash────> free
#                        │ └──free, with hash────> cached ──allocate, by hash──> held
#                        │                          └──evicted, lowest value first──> held by another sequence
#                        └──quarantine──> quarantined ──release──> free
#     free ──adopt──> cached                       content written by an earlier process
#
# Invariant: free + held + cached + quarantined == total.


class BlockAllocator:
    """Allocator and prefix cache of blocks on the device (BlockManager), places in a lower tier, or state slots.

    Blocks are reference-counted: sequences that share a prefix hold the same blocks. A full block whose content is
    final can be registered under its prefix hash; it then stays cached after its sequences end, until its space is
    needed. `eviction` picks the cached block to reuse, and belongs to this allocator alone. Owned by the step thread.
    """

    def __init__(self, num_blocks: int, eviction: Eviction | None = None) -> None:
        """eviction: None evicts the least recently used block first."""
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # Reference counts of held blocks.
        self._refs: dict[int, int] = {}
        # Blocks with a hash and no reference.
        self._cached: Eviction = LeastRecentlyUsed() if eviction is None else eviction
        # Held blocks that were not cache hits.
        self._origins: dict[int, Origin] = {}
        self._quarantined: set[int] = set()
        # Blocks with a hash, held or cached.
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}
        # Called with (block, hash) before an evicted block is overwritten.
        self.on_evict: Callable[[int, bytes], None] = lambda block, prefix_hash: None

    def __contains__(self, prefix_hash: bytes) -> bool:
        """Return True if this block is cached or held now, regardless of its predecessors."""
        return prefix_hash in self._block_of

    def block_of(self, prefix_hash: bytes) -> int:
        """Return the block id registered under `prefix_hash`. Raises KeyError."""
        return self._block_of[prefix_hash]

    @property
    def num_full(self) -> int:
        """Number of blocks that can be matched now."""
        return len(self._block_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    def match(self, hashes: Sequence[bytes], *, after: int = 0) -> int:
        """Count the leading blocks of this prefix that are present. Read-only. after: number known to be present."""
        for depth in range(after, len(hashes)):
            if hashes[depth] not in self._block_of:
                return depth
        return len(hashes)

    def allocate(
        self, hashes: Sequence[bytes], num_blocks: int, *, to_load: Collection[int] | None = None
    ) -> tuple[list[int], int] | None:
        """Take `num_blocks` blocks, reusing the leading ones that `hashes` find in the cache.

        Returns (block ids, number of leading cache hits). Returns None and takes nothing if the pool is full.
        to_load: places in `hashes` that get new blocks even if cached. A load then fills all new blocks, so that cached
        blocks behind a missing one are reused, too. None: nothing is loaded.
        """
        known = hashes[:num_blocks]
        if to_load is None:
            places = list(range(self.match(known)))
        else:
            places = [place for place, prefix_hash in enumerate(known) if prefix_hash in self and place not in to_load]
        reused = {place: self._block_of[hashes[place]] for place in places}
        if num_blocks - sum(block in self._refs for block in reused.values()) > self.num_available:
            return None
        for place, block in reused.items():
            self._cached.used(block, hashes[place])
            self._refs[block] = self._refs.get(block, 0) + 1
        num_matched = next((i for i, place in enumerate(places) if i != place), len(places))
        origin = self._cached.origin_after(hashes[num_matched - 1] if num_matched else None)
        taken = iter(self._take(num_blocks - len(reused), origin))
        return [reused[place] if place in reused else next(taken) for place in range(num_blocks)], num_matched

    def num_needed(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Count the available blocks that `allocate` would take: all but those that a sequence already holds."""
        num_matched = self.match(hashes[:num_blocks])
        num_held = sum(self._block_of[prefix_hash] in self._refs for prefix_hash in hashes[:num_matched])
        return num_blocks - num_held

    def extend(self, blocks: list[int], num_blocks: int) -> bool:
        """Append blocks for generated tokens to a sequence's table until it has `num_blocks`.

        Returns False and takes nothing if the pool is full.
        """
        missing = num_blocks - len(blocks)
        if missing > self.num_available:
            return False
        blocks += self._take(max(0, missing), Origin.GENERATED)
        return True

    def extend_each(self, tables: Sequence[list[int]]) -> bool:
        """Append one block to each table. Returns False and takes nothing if the pool is full."""
        if len(tables) > self.num_available:
            return False
        for table, block in zip(tables, self._take(len(tables), Origin.GENERATED), strict=True):
            table.append(block)
        return True

    def adopt(self, content: Mapping[int, bytes]) -> None:
        """Cache those free blocks whose content survives from an earlier process.

        The first in order is evicted first. A hash that is already known keeps its block.
        """
        free = set(self._free)
        for block, prefix_hash in content.items():
            if block in free and prefix_hash not in self._block_of:
                free.remove(block)
                self._register(block, prefix_hash)
                self._cached.full(prefix_hash)
                self._cached.add(block, prefix_hash, Origin.FIRST)
        self._free = deque(block for block in self._free if block in free)

    def discard(self, prefix_hash: bytes) -> None:
        """Drop a cached block whose content is lost. No-op if a sequence holds it or it is absent."""
        block = self._block_of.get(prefix_hash)
        if block is not None and block in self._cached:
            self._cached.used(block, prefix_hash)
            self._cached.forget(prefix_hash)
            self._forget(block)
            self._free.append(block)

    def unfill(self, prefix_hash: bytes) -> None:
        """Remove a hash from the index so that it is never matched again, even while its block is held."""
        self.discard(prefix_hash)
        block = self._block_of.get(prefix_hash)
        if block is not None:
            self._cached.forget(prefix_hash)
            self._forget(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each of these held blocks, for a sequence that forks."""
        for block in blocks:
            assert block in self._refs, f"block {block} is not held"
            self._refs[block] += 1

    def fill_block(self, block: int, prefix_hash: bytes) -> None:
        """Register a held, full, final block under its hash. A hash that is already known keeps its first block."""
        assert block in self._refs, f"block {block} is not held"
        if block not in self._hash_of and prefix_hash not in self._block_of:
            self._register(block, prefix_hash)
            self._cached.full(prefix_hash)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a table.

        The tail becomes evictable before the head, because a tail cannot be matched without its head.
        """
        for block in reversed(blocks):
            if self._drop(block):
                if prefix_hash := self._hash_of.get(block):
                    self._cached.add(block, prefix_hash, self._origins.pop(block, Origin.FIRST))
                else:
                    self._origins.pop(block, None)
                    self._free.append(block)

    def spare(self, hashes: Iterable[bytes]) -> None:
        """Mark cached blocks for early eviction, because another replica also holds them."""
        for prefix_hash in hashes:
            block = self._block_of.get(prefix_hash)
            if block is not None and block in self._cached:
                self._cached.spare(block)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block and block the reuse of unreferenced ones until `release`.

        A peer may still be writing to them.
        """
        for block in blocks:
            if self._drop(block):
                self._origins.pop(block, None)
                self._cached.forget(self._hash_of.get(block, b""))
                self._forget(block)
                self._quarantined.add(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Free quarantined blocks that no peer can write to any more. Other blocks are ignored."""
        for block in blocks:
            if block in self._quarantined:
                self._quarantined.remove(block)
                self._free.append(block)

    def take_changes(self) -> dict[bytes, bool]:
        """Return the hashes stored or removed since the last call, with True if the hash can be matched now."""
        changes, self._changes = self._changes, {}
        return changes

    def full_hashes(self) -> list[bytes]:
        """Return every prefix hash that can be matched now."""
        return list(self._block_of)

    def num_freed_by(self, released: Iterable[Sequence[int]]) -> int:
        """Count the blocks that would have no reference left if each of these lists were released."""
        counts = Counter(block for blocks in released for block in blocks)
        return sum(self._refs[block] == count for block, count in counts.items())

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the hash tables mirror each other."""
        cached = {block for block in self._hash_of if block in self._cached}
        states = [set(self._free), set(self._refs), cached, self._quarantined]
        union = set().union(*states)
        assert len(self._free) == len(set(self._free)), "a block is in the free list twice"
        assert sum(map(len, states)) == len(union) == self.num_blocks, (
            f"blocks lost or duplicated, by state: {list(map(len, states))}"
        )
        assert all(count > 0 for count in self._refs.values()), "held block without a reference"
        assert {h: b for b, h in self._hash_of.items()} == self._block_of, "hash tables disagree"
        assert len(self._cached) == len(cached), "a cached block has no hash"
        assert set(self._hash_of) <= cached | set(self._refs), (
            "a hash belongs to a block that is neither cached nor held"
        )
        assert set(self._origins) <= set(self._refs), "an origin is stored for a block that is not held"

    def _drop(self, block: int) -> bool:
        """Drop one reference. Returns True if it was the last."""
        self._refs[block] -= 1
        if self._refs[block]:
            return False
        del self._refs[block]
        return True

    def _take(self, count: int, origin: Origin) -> list[int]:
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._refs.update(dict.fromkeys(blocks, 1))
        self._origins.update(dict.fromkeys(blocks, origin))
        return blocks

    def _evict(self) -> int:
        block = self._cached.pop()
        self._evicted(block)
        self._forget(block)
        return block

    def _evicted(self, block: int) -> None:
        self.on_evict(block, self._hash_of[block])

    def _register(self, block: int, prefix_hash: bytes) -> None:
        self._hash_of[block], self._block_of[prefix_hash] = prefix_hash, block
        self._changes[prefix_hash] = True

    def _forget(self, block: int) -> None:
        """Remove the hash of a block, if it has one."""
        if prefix_hash := self._hash_of.pop(block, None):
            del self._block_of[prefix_hash]
            self._changes[prefix_hash] = False
