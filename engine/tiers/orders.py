"""What rank 0 tells every rank to do with its lower tiers, and what a rank answers. Plain values, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.words.tier import Tier


class Spill(NamedTuple):
    """From the host to the disk."""

    source: int  # place
    target: int  # place
    prefix_hash: bytes


class Save(NamedTuple):
    """From the device to the uppermost tier below it."""

    tier: Tier
    block: int
    place: int
    prefix_hash: bytes


class Source(NamedTuple):
    """Of one block that is loaded."""

    tier: Tier
    place: int
    prefix_hash: bytes
    block: int  # on the device, to be filled


@dataclass(frozen=True)
class LoadOrder:
    """Back to the device, in order, as far as it goes."""

    id: int
    sources: list[Source]


@dataclass
class TierOrders:
    """Carried out in this order: spills, then saves, then loads."""

    spills: list[Spill] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spills or self.saves or self.loads)

    def to_json(self) -> dict[str, Any]:
        return {
            "spills": [(s.source, s.target, s.prefix_hash.hex()) for s in self.spills],
            "saves": [(s.tier, s.block, s.place, s.prefix_hash.hex()) for s in self.saves],
            "loads": [
                (order.id, [(s.tier, s.place, s.prefix_hash.hex(), s.block) for s in order.sources])
                for order in self.loads
            ],
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> TierOrders:
        return cls(
            spills=[Spill(source, target, bytes.fromhex(text)) for source, target, text in fields["spills"]],
            saves=[Save(Tier(tier), block, place, bytes.fromhex(text)) for tier, block, place, text in fields["saves"]],
            loads=[
                LoadOrder(
                    id, [Source(Tier(tier), place, bytes.fromhex(text), block) for tier, place, text, block in it]
                )
                for id, it in fields["loads"]
            ],
        )


@dataclass(frozen=True)
class Loaded:
    """What came of a load on one rank."""

    id: int
    num_blocks: int  # leading blocks that are in the pool now
    num_bytes: dict[Tier, int]
    seconds: dict[Tier, float]
