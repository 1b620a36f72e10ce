"""Commands from rank 0 to every rank for its lower tiers, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from core.types.tier import Tier


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
