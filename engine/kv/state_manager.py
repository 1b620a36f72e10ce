"""State slots of models with recurrent layers: allocation, and a cache of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.kv.block_allocator import BlockAllocator

# Copies of whole state slots: source, target.
Copies = list[tuple[int, int]]


class StateManager:
    """Allocator of state slots, and cache of checkpoints. Owned by the step thread, as part of a BlockManager.

    A sequence of a model with recurrent layers has one slot, which every step overwrites. A checkpoint is a slot with
    the state at the end of a full block, found by the block's prefix hash. The least recently used checkpoint is
    evicted first. Slot ids start at `first`, after those of blocks.
    """

    def __init__(self, num_slots: int, *, first: int, interval: int = 128) -> None:
        """interval: see `checkpoint_every`."""
        self.num_slots = num_slots
        self.interval = interval
        self.first = first
        self._slots = BlockAllocator(num_slots)
        self._slots.on_evict = self._evicted
        self._copies: Copies = []
        # Called with (index of the slot, hash) before the slot of an evicted checkpoint is overwritten.
        self.on_evict: Callable[[int, bytes], None] = lambda index, prefix_hash: None

    def checkpoint_every(self, num_tokens: int, *, block_size: int) -> None:
        """Set the tokens between the checkpoints of a decoding sequence, rounded up to whole blocks."""
        self.interval = -(-num_tokens // block_size) * block_size

    def index(self, slot: int) -> int:
        """Return the index of a slot in the pool, which counts from 0."""
        return slot - self.first

    def __contains__(self, prefix_hash: bytes) -> bool:
        """Return True if there is a checkpoint at the end of this block."""
        return prefix_hash in self._slots

    @property
    def num_available(self) -> int:
        """Slots that `take` can hand out."""
        return self._slots.num_available

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that no request reads, evicted when slots are needed."""
        return self._slots.num_cached

    def match(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks up to the last one with a checkpoint. Read-only."""
        return next((depth for depth in range(len(hashes), 0, -1) if hashes[depth - 1] in self._slots), 0)

    def take(self, prefix_hash: bytes | None = None) -> int:
        """Take a slot, for a copy of a checkpoint or without content. One must be available."""
        source = None if prefix_hash is None else self._hold(prefix_hash)
        if source is not None:
            self._slots.free([source])  # most recently used, so evicted last
        slot = self._take()
        if source is not None and slot != source:
            self._copies.append((source, slot))
        return slot + self.first

    def fork(self, slot: int) -> int:
        """Take a slot for a copy of another sequence's state. One must be available."""
        twin = self._take()
        self._copies.append((self.index(slot), twin))
        return twin + self.first

    def checkpoint(self, slot: int, prefix_hash: bytes) -> None:
        """Copy a sequence's state to a checkpoint of this block. No-op if it has one, or if all slots are held."""
        if prefix_hash not in self._slots and self.num_available:
            self.fill_slot(self.fork(slot), prefix_hash)

    def fill_slot(self, slot: int, prefix_hash: bytes) -> None:
        """Turn a held slot into a checkpoint. It must have the state at the end of this block before the next read."""
        self._slots.fill_block(self.index(slot), prefix_hash)
        self.free([slot])

    def hold(self, prefix_hash: bytes) -> int:
        """Take a reference to a checkpoint, so that it can be read. Raises KeyError."""
        return self._hold(prefix_hash) + self.first

    def forget(self, prefix_hash: bytes) -> None:
        """Drop a checkpoint whose content may be wrong."""
        self._slots.unfill(prefix_hash)

    def index_of(self, prefix_hash: bytes) -> int | None:
        """Return the index in the pool of a checkpoint's slot; None if there is none, or it is still to be copied."""
        if prefix_hash not in self._slots:
            return None
        index = self._slots.block_of(prefix_hash)
        return None if self._is_awaited(index) else index

    def copy_to(self, slot: int, prefix_hash: bytes) -> None:
        """Copy a checkpoint to a held slot. Raises KeyError."""
        self._copies.append((self._slots.block_of(prefix_hash), self.index(slot)))

    def share(self, slots: Iterable[int]) -> None:
        """Take one more reference to each of these held slots."""
        self._slots.share(self.index(slot) for slot in slots)

    def free(self, slots: Iterable[int]) -> None:
        """Drop one reference to each slot. Checkpoints stay findable."""
        self._slots.free([self.index(slot) for slot in slots])

    def quarantine(self, slots: Iterable[int]) -> None:
        """Drop one reference to each slot and block the reuse of unreferenced ones until `release`."""
        self._slots.quarantine(self.index(slot) for slot in slots)

    def release(self, slots: Iterable[int]) -> None:
        """Free quarantined slots that no peer can write to any more. Other slots are ignored."""
        self._slots.release(self.index(slot) for slot in slots)

    def take_copies(self) -> Copies:
        """Return and clear the copies that every rank must make, in this order, before the next step.

        Their slots are counted from 0, as in the pool.
        """
        copies, self._copies = self._copies, []
        return copies

    def take_changes(self) -> dict[bytes, bool]:
        """Return the hashes of checkpoints made or dropped since the last call, with True if there is one now."""
        return self._slots.take_changes()

    def full_hashes(self) -> list[bytes]:
        """Return the hashes of all checkpoints."""
        return self._slots.full_hashes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        self._slots.check_integrity()

    def _evicted(self, index: int, prefix_hash: bytes) -> None:
        if not self._is_awaited(index):
            self.on_evict(index, prefix_hash)

    def _is_awaited(self, index: int) -> bool:
        """Return True if a copy to this slot is still to be made."""
        return any(target == index for _, target in self._copies)

    def _take(self) -> int:
        slots: list[int] = []
        assert self._slots.extend(slots, 1), "no state slot is available"
        return slots[0]

    def _hold(self, prefix_hash: bytes) -> int:
        self._slots.block_of(prefix_hash)
        allocated = self._slots.allocate([prefix_hash], 1)
        assert allocated, "a checkpoint needs no free slot"
        return allocated[0][0]
