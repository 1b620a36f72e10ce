"""What rank 0 tells every rank to do with its lower tiers, and what a rank answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from core.types.tier import Tier


class Spill(NamedTuple):
    """An order to copy one block from the host to the disk."""

    source: int  # place
    target: int  # place
    prefix_hash: bytes


class Save(NamedTuple):
    """An order to copy one block from the device to the uppermost tier below it."""

    tier: Tier
    block: int
    place: int
    prefix_hash: bytes


class LoadSource(NamedTuple):
    """Where one block is loaded from, and where to."""

    tier: Tier
    place: int
    prefix_hash: bytes
    block: int  # on the device, to be filled


@dataclass(frozen=True)
class LoadOrder:
    """An order to load blocks back to the device, one after the other, as far as it goes."""

    id: int
    sources: list[LoadSource]


@dataclass
class TierOrders:
    """Carried out in this order: spills, then saves, then loads."""

    spills: list[Spill] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spills or self.saves or self.loads)


@dataclass(frozen=True)
class LoadResult:
    """What came of a load on one rank."""

    id: int
    num_blocks: int  # leading blocks that are in the pool now
    num_bytes: dict[Tier, int]
    seconds: dict[Tier, float]
