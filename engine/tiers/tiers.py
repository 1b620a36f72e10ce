"""Lower tiers of a replica, as used by the step loop of rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from core.types.tier import Tier
from engine.kv.block_allocator import BlockAllocator
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import LeastRecentlyUsed, make_eviction
from engine.kv.layout import KVLayout
from engine.scheduler.sequence import Sequence as TokenSequence
from engine.tiers.commands import Load, LoadResult
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.table import TierTable

T = TypeVar("T")

# Per rank. Loads slower than this are not waited for.
_MIN_BYTES_PER_S = 20e6
# Blocks copied to disk per idle step.
_AHEAD = 64


class Tiers(Generic[T]):
    """Tier operations of the step loop. Owned by the step thread. Without lower tiers every method is a no-op.

    Orders go to every rank with the step, before any write to blocks. The owner of a load waits until `loaded` returns
    the load or `expired` names it. `table` holds the part that needs neither clock nor disk.
    """

    def __init__(
        self, blocks: BlockManager, rank: RankTiers | None, layout: KVLayout, *, eviction: str, timeout_s: float
    ) -> None:
        """rank: tiers of rank 0; None: no lower tiers. eviction: policy of the host tier; the disk tier evicts by age.

        timeout_s: extra time for a load beyond the transfer time of its bytes and of the loads before it.
        """
        self.num_losses = 0
        self._rank = rank
        self._layout = layout
        self._timeout_s = timeout_s
        self.table: TierTable[T] = TierTable(
            blocks,
            {tier: _allocator(tier, places, eviction) for tier, places in (rank.num_places if rank else {}).items()},
            num_ranks=layout.tensor_parallel,
            place_bytes=layout.place_bytes,
            num_pieces=layout.num_pieces,
        )
        self._loads: dict[T, Load[T]] = {}

    def save_ahead(self, *, is_last: bool = False) -> None:
        """Copy blocks to disk with the next orders; call while idle. is_last: copy as many as the disk accepts."""
        if self._rank and self.table.has_unsaved:
            room = self._rank.room_ahead
            self.table.save_ahead(room if is_last else min(_AHEAD, room))

    def offer(self, sequence: TokenSequence, *, tokens_per_s: float) -> int:
        """Count the leading tokens that are on the device or load faster than they compute; 0 if none needs loading.

        tokens_per_s: prefill throughput; 0 if unknown.
        """
        size, hashes = self._layout.block_size, sequence.hashes()
        if self._is_stuck:
            return 0
        if self._layout.num_pieces:
            # The last token is computed again, so a checkpoint must be before it.
            hashes = hashes[: sequence.num_reusable(len(sequence.tokens)) // size]
        compute_block_s = size / tokens_per_s if tokens_per_s else 0.0
        return self.table.offer(hashes, compute_block_s=compute_block_s) * size

    def begin(
        self,
        owner: T,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        *,
        state: tuple[bytes, int] | None = None,
    ) -> bool:
        """Load the leading blocks that are still present, with the next orders. Returns False if there are none.

        Also returns False while an overdue load is in flight: loads behind it would quarantine ever more blocks.
        state: as in TierTable.begin.
        """
        if self._is_stuck:
            return False
        layout = self._layout
        num_queued = len(hashes) + sum(len(load.order.sources) for load in self._loads.values())
        num_queued += min(len(hashes), layout.cache.num_checkpoints) * layout.num_pieces
        timeout_s = self._timeout_s + num_queued * layout.place_bytes / _MIN_BYTES_PER_S
        load = self.table.begin(owner, hashes, blocks, expires_at=time.monotonic() + timeout_s, state=state)
        if load:
            self._loads[owner] = load
        return load is not None

    def loaded(self, rank: int, loaded: LoadResult) -> Load[T] | None:
        """Record one rank's result. Returns the load once all ranks have reported, unless it was cancelled."""
        load = self.table.loaded(rank, loaded)
        if load:
            del self._loads[load.owner]
            self.num_losses += load.num_read < len(load.order.sources)
        return load

    def cancel(self, owner: T) -> set[int]:
        """Cancel the owner's load. Returns the blocks that no longer belong to the owner."""
        load = self._loads.pop(owner, None)
        if load is None:
            return set()
        self.table.give_up(load)
        return set(load.blocks)

    def expired(self) -> list[T]:
        """Return the owners of loads past their deadline; the caller cancels them."""
        return [load.owner for load in self.table.expired(time.monotonic())]

    @property
    def _is_stuck(self) -> bool:
        return self.table.has_late(time.monotonic())

    def take_changes(self) -> dict[bytes, Tier | None]:
        """Return the hashes that may have moved since the last call, with the best tier that holds each."""
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
        return self.table.num_saved.get(tier, 0) * self._layout.place_bytes * self._layout.tensor_parallel


def _allocator(tier: Tier, num_places: int, eviction: str) -> BlockAllocator:
    # The disk may hold many files: keep only their order, not their history.
    policy = LeastRecentlyUsed() if tier is Tier.DISK else make_eviction(eviction, num_blocks=num_places)
    return BlockAllocator(num_places, policy)
