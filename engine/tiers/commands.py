"""Commands from rank 0 to every rank for its lower tiers, their results, and the loads in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from core.types.tier import Tier

T = TypeVar("T")


class Spill(NamedTuple):
    """Command to copy one block from host to disk."""

    source: int  # place
    target: int  # place
    prefix_hash: bytes


class Save(NamedTuple):
    """Command to copy one block, or one piece of a checkpoint, from the device to a lower tier."""

    tier: Tier
    block: int  # or a piece: see KVPool.copy_out
    place: int
    prefix_hash: bytes


class LoadSource(NamedTuple):
    """Source and target of one block, or one piece of a checkpoint, to load."""

    tier: Tier
    place: int
    prefix_hash: bytes
    # Target on the device; or a piece, as in Save.
    block: int


@dataclass(frozen=True)
class LoadOrder:
    """Command to load blocks to the device in order, stopping at the first that is missing."""

    id: int
    sources: list[LoadSource]
    # Blocks to copy on the device, without their parts, before the load: source, target.
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class TierOrders:
    """Commands for one step, executed in this order: spills, saves, loads."""

    spills: list[Spill] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spills or self.saves or self.loads)


@dataclass(frozen=True)
class LoadResult:
    """Result of a load on one rank."""

    id: int
    # Leading blocks that are now in the pool.
    num_blocks: int
    num_bytes: dict[Tier, int]
    seconds: dict[Tier, float]


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
    # Leading blocks that the owner can use after a whole load.
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
