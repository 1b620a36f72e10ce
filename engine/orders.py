"""What rank 0 tells every rank of its replica to do in a step: one schema for both roles. It travels as
`cluster.worker.step_message`."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.words.handoff import Handoff, HandoffKey
from engine.tiers.orders import TierOrders


@dataclass(frozen=True, slots=True)
class BeginOrder:
    """A handoff to fill from now on, and what of it is in the pool already."""

    handoff: Handoff
    blocks: list[int]  # the sequence's table, from position 0 on
    num_tokens: int  # leading positions that are there


@dataclass(frozen=True, slots=True)
class ShipOrder:
    """Positions [start, end) of a sequence that decodes while it is shipped: earlier steps computed them."""

    key: HandoffKey
    blocks: list[int]  # the table, which may have grown
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """Nothing more comes of this handoff."""

    key: HandoffKey
    num_tokens: int  # positions that were handed over in all
    next_tokens: list[int]  # tokens that the other side does not know


@dataclass(slots=True)
class Orders:
    """Carried out in this order, then the step's batch is computed, if there is one. The parts of rank 0 that have
    something to order add to the lists; whoever leads the step sends it, and it is not changed after that."""

    tiers: list[TierOrders] = field(default_factory=list)  # before anything is written to the pool
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks: source, target
    grants: list[BeginOrder] = field(default_factory=list)  # prefixes that others pull: all of each is in the pool
    begins: list[BeginOrder] = field(default_factory=list)
    ships: list[ShipOrder] = field(default_factory=list)
    commits: list[CommitOrder] = field(default_factory=list)
    aborts: list[HandoffKey] = field(default_factory=list)  # no longer wanted
    rows: list[HandoffKey | None] = field(default_factory=list)  # where each of the batch is shipped
    stop: bool = False  # the replica ends

    def __bool__(self) -> bool:
        return self != _NOTHING

    @property
    def reads_pool(self) -> bool:
        """Whether the bytes of blocks are wanted, before the batch is computed."""
        return bool(self.tiers or self.copies or self.grants or self.begins or self.ships or self.commits)


_NOTHING = Orders()
