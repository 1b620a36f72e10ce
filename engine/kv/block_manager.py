"""Block manager of one replica: its KV blocks, the state slots and parts that belong to them, and its prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.kv.block_allocator import BlockAllocator
from engine.kv.eviction import Eviction
from engine.kv.state_manager import StateManager
from engine.kv.window_manager import WindowManager


class BlockManager(BlockAllocator):
    """Allocator of the blocks on the device. Owned by the step thread; the pools of all ranks follow it.

    `windows` manages the parts of blocks in layers with an attention window, if they are freed.

    `states` manages the state slots of models with recurrent layers. Their ids follow the block ids, so that `share`,
    `free`, `quarantine` and `release` accept both in one list.

    A block's checkpoint is the further data that a sequence needs to continue behind it: the state at its end, or its
    part. A model has one of the two kinds, or none.
    """

    def __init__(
        self,
        num_blocks: int,
        eviction: Eviction | None = None,
        *,
        num_states: int = 0,
        windows: WindowManager | None = None,
    ) -> None:
        """num_states: state slots; 0: the model has no recurrent layers. windows: None: every block has all layers."""
        super().__init__(num_blocks, eviction)
        self.states = StateManager(num_states, first=num_blocks) if num_states else None
        self.windows = windows
        if windows:
            windows.hash_of = self._hash_of.get

    @property
    def num_usable(self) -> int:
        """Number of available blocks as routers see it: at most the share of the pool that unreserved parts allow."""
        if not self.windows:
            return self.num_available
        unreserved_share = max(0, self.windows.num_unreserved) / self.windows.num_reservable
        return min(self.num_available, int(self.num_blocks * unreserved_share))

    def match_reusable(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks that a sequence can continue from.

        With states, up to the last checkpoint; with windows, to the last block behind which a query has all parts.
        """
        depth = self.match(hashes)
        if self.windows:
            return self.windows.match(depth, lambda place: self.has_part(hashes[place]))
        return depth if self.states is None else self.states.match(hashes[:depth])

    def has_part(self, prefix_hash: bytes) -> bool:
        """Return True if this block is present and has its part."""
        block = self._block_of.get(prefix_hash)
        return self.windows is not None and block is not None and block in self.windows

    def places_without_part(self, hashes: Sequence[bytes]) -> set[int]:
        """Return the places of blocks that the query behind this prefix sees and that are present without parts."""
        seen = self.windows.seen_from(len(hashes)) if self.windows else ()
        return {place for place in seen if hashes[place] in self and not self.has_part(hashes[place])}

    # Checkpoints, by the hashes of their blocks.

    def checkpoint_index(self, prefix_hash: bytes) -> int | None:
        """Return the index in the pool of a block's checkpoint: of a state slot, or of a part.

        None if there is none, or if its state is still to be copied.
        """
        if self.states:
            return self.states.index_of(prefix_hash)
        block = self._block_of.get(prefix_hash)
        return self.windows.part_of(block) if self.windows and block is not None else None

    def checkpointed_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks with a checkpoint."""
        if self.states:
            return self.states.full_hashes()
        return [prefix_hash for prefix_hash in self._block_of if self.has_part(prefix_hash)]

    def take_checkpoint_changes(self) -> dict[bytes, bool]:
        """Return the hashes of blocks whose checkpoint was made or dropped since the last call; True: it exists."""
        if self.states:
            return self.states.take_changes()
        return self.windows.take_found() if self.windows else {}

    # The allocator's changes, with their effect on state slots and parts.

    def share(self, blocks: Iterable[int]) -> None:
        super().share(self._without_slots(blocks, StateManager.share))

    def free(self, blocks: Sequence[int]) -> None:
        super().free(self._without_slots(blocks, StateManager.free))

    def quarantine(self, blocks: Iterable[int]) -> None:
        blocks = self._without_slots(blocks, StateManager.quarantine)
        super().quarantine(blocks)
        if self.windows:
            for block in dict.fromkeys(blocks):
                if block in self._quarantined:
                    self.windows.quarantine(block)

    def release(self, blocks: Iterable[int]) -> None:
        blocks = self._without_slots(blocks, StateManager.release)
        super().release(blocks)
        if self.windows:
            for block in blocks:
                self.windows.release(block)

    def fill_block(self, block: int, prefix_hash: bytes) -> None:
        """Register a held, full, final block under its hash.

        A known hash keeps its first block, unless only the new block has a part: without one, it cannot be reused.
        """
        known = self._block_of.get(prefix_hash) if self.windows else None
        if self.windows and known is not None and known not in self.windows:
            if block in self.windows and block not in self._hash_of:
                self.unfill(prefix_hash)
        super().fill_block(block, prefix_hash)

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.states:
            self.states.check_integrity()
        if self.windows:
            self.windows.check_integrity()

    def _evicted(self, block: int) -> None:
        super()._evicted(block)
        if self.windows:
            self.windows.evict(block)

    def _register(self, block: int, prefix_hash: bytes) -> None:
        super()._register(block, prefix_hash)
        if self.windows:
            self.windows.hashed(block, prefix_hash)

    def _forget(self, block: int) -> None:
        prefix_hash = self._hash_of.get(block)
        super()._forget(block)
        if self.windows and prefix_hash:
            self.windows.forget(block, prefix_hash)

    def _without_slots(self, ids: Iterable[int], change: Callable[[StateManager, list[int]], None]) -> Sequence[int]:
        """Apply `change` to the state slots among `ids`, and return the blocks among them."""
        if self.states is None:
            return ids if isinstance(ids, Sequence) else list(ids)
        blocks, slots = list[int](), list[int]()
        for number in ids:
            (blocks if number < self.num_blocks else slots).append(number)
        if slots:
            change(self.states, slots)
        return blocks
