"""Loads from lower tiers to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from core.types.tier import Tier
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource

T = TypeVar("T")


@dataclass(eq=False)
class Load(Generic[T]):
    """Load of blocks to the device, in flight, for `owner`."""

    owner: T
    order: LoadOrder
    # On the caller's clock.
    expires_at: float
    # Blocks that are filled, and the slot of a state.
    blocks: list[int]
    # Leading sources that are blocks; the others are pieces of checkpoints.
    num_block_sources: int
    # Blocks that the owner has in addition after a whole load.
    num_blocks: int
    # Nothing is usable unless all of it is read, because the owner needs the checkpoints.
    is_whole: bool = False
    is_given_up: bool = False
    # By rank.
    answers: dict[int, LoadResult] = field(default_factory=dict)

    @property
    def num_read(self) -> int:
        """Number of leading sources that every rank has read."""
        return min(answer.num_blocks for answer in self.answers.values())

    @property
    def is_usable(self) -> bool:
        """True if the owner can continue after the loaded blocks."""
        return self.num_read == len(self.order.sources) if self.is_whole else self.num_read > 0

    @property
    def num_loaded(self) -> int:
        """Number of leading blocks that the owner can use."""
        if self.is_whole:
            return self.num_blocks if self.is_usable else 0
        return self.num_read

    @property
    def num_hits(self) -> int:
        """Number of sources of blocks that the owner can use."""
        return min(self.num_read, self.num_block_sources) if self.is_usable else 0

    def broken(self, *, first_piece: int, num_pieces: int) -> list[LoadSource]:
        """Return the source that a rank could not read, with the other pieces of its checkpoint.

        first_piece: number from which targets are pieces; see KVPool.copy_out.
        """
        sources, failed = self.order.sources, self.num_read
        if failed == len(sources) or failed < self.num_block_sources:
            return sources[failed : failed + 1]
        start = failed - (sources[failed].block - first_piece) % num_pieces
        return sources[start : start + num_pieces]


def worth_loading(tiers: Sequence[Tier], load_s: Mapping[Tier, float], compute_s: float) -> int:
    """Return the number of leading blocks to load that minimizes the time until all are present. Pure.

    load_s: seconds per block by tier, 0 if unknown; compute_s: seconds to compute a block.
    """
    if not compute_s:
        return len(tiers)
    best, best_s, saved_s = 0, 0.0, 0.0
    for count, tier in enumerate(tiers, 1):
        saved_s += compute_s - load_s[tier]
        if saved_s > best_s:
            best, best_s = count, saved_s
    return best
