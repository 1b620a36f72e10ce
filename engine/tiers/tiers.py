"""The lower tiers of a replica, as the step loop of its rank 0 uses them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from core.types.tier import Tier
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import LeastRecentlyUsed, make_eviction
from engine.kv.layout import KVLayout
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.tiers.commands import LoadResult
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.table import Load, TierTable

T = TypeVar("T")

_MIN_BYTES_PER_S = 20e6  # of a rank; what is slower is not waited for
_AHEAD = 64  # blocks that are copied to the disk each time there is nothing else to do


class Tiers(Generic[T]):
    """Owned by the step thread. A replica without lower tiers has none of it, and all of this does nothing.

    Orders go to every rank with the step, before anything that writes to blocks. A load's owner waits until `loaded`
    hands the load over, or `expired` names it. What needs neither clock nor disk is asked of the `table`.
    """

    def __init__(
        self, blocks: BlockManager, rank: RankTiers | None, layout: KVLayout, *, eviction: str, timeout_s: float
    ) -> None:
        """rank: of rank 0 itself. eviction: of the memory; files are given up by age. timeout_s: of a load, beyond what
        its bytes need, and those of the loads before it."""
        self.num_losses = 0
        self._rank = rank
        self._layout = layout
        self._timeout_s = timeout_s
        self.table: TierTable[T] = TierTable(
            blocks,
            {tier: _manager(tier, places, eviction) for tier, places in (rank.num_places if rank else {}).items()},
            num_ranks=layout.tensor_parallel,
            block_bytes=layout.block_bytes,
        )
        self._loads: dict[T, Load[T]] = {}

    def save_ahead(self, *, is_last: bool = False) -> None:
        """There is nothing else to do: copy blocks to the disk, with the next orders; as many as it takes if these are
        the last."""
        if self._rank and self.table.has_unsaved:
            room = self._rank.room_ahead
            self.table.save_ahead(room if is_last else min(_AHEAD, room))

    def offer(self, sequence: TokenSequence, *, tokens_per_s: float) -> int:
        """How many leading tokens are here, or can be loaded sooner than computed; 0 if there is nothing to load.

        tokens_per_s: of computing; 0: not yet known.
        """
        size = self._layout.block_size
        compute_block_s = size / tokens_per_s if tokens_per_s else 0.0
        return self.table.offer(sequence.hashes(), compute_block_s=compute_block_s) * size

    def begin(self, owner: T, hashes: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Load what is still here of these blocks, in order, with the next orders. False if that is nothing."""
        num_queued = len(hashes) + sum(len(load.blocks) for load in self._loads.values())
        timeout_s = self._timeout_s + num_queued * self._layout.block_bytes / _MIN_BYTES_PER_S
        load = self.table.begin(owner, hashes, blocks, expires_at=time.monotonic() + timeout_s)
        if load:
            self._loads[owner] = load
        return load is not None

    def loaded(self, rank: int, loaded: LoadResult) -> Load[T] | None:
        """One rank has done with a load. The load, once, when every rank has and its owner waits for it."""
        load = self.table.loaded(rank, loaded)
        if load:
            del self._loads[load.owner]
            self.num_losses += load.num_loaded < len(load.blocks)
        return load

    def cancel(self, owner: T) -> set[int]:
        """The owner waits no more. Returns the blocks that are not its own any more."""
        load = self._loads.pop(owner, None)
        if load is None:
            return set()
        self.table.give_up(load)
        return set(load.blocks)

    def expired(self) -> list[T]:
        """Who has waited long enough: cancel it."""
        return [load.owner for load in self.table.expired(time.monotonic())]

    def take_changes(self) -> dict[bytes, Tier | None]:
        """Every hash whose place may have changed since the last call, and the best tier that holds it."""
        if self._rank:
            if found := self._rank.take_found():
                self.table.found(found)
            for tier, prefix_hash in self._rank.take_lost():
                self.table.lost(tier, prefix_hash)
                self.num_losses += 1
        return self.table.take_changes()

    def hit_tokens(self, tier: Tier) -> int:
        return self.table.num_hits.get(tier, 0) * self._layout.block_size

    def saved_bytes(self, tier: Tier) -> int:
        return self.table.num_saved.get(tier, 0) * self._layout.block_bytes * self._layout.tensor_parallel


def _manager(tier: Tier, num_places: int, eviction: str) -> BlockManager:
    # There may be many files: only their order is remembered, not their history.
    is_large = tier is Tier.DISK
    return BlockManager(num_places, LeastRecentlyUsed() if is_large else make_eviction(eviction, num_blocks=num_places))
