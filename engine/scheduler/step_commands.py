"""What rank 0 tells every rank of its replica to do in a step: one schema for both roles. It travels as
`worker.step_message`."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.types.handoff import Handoff, HandoffKey
from engine.tiers.commands import TierOrders


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


@dataclass(frozen=True, slots=True)
class IncomingTransferOrder:
    """KV of positions [start, end) of a table has come from elsewhere, and what is known of the last: see
    engine.spec_decode.heads.features. Rank 0 has noted it already."""

    blocks: list[int]
    start: int
    end: int
    features: bytes


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Heads guess together what follows some sequences: rank 0 says after every place which tokens it has chosen."""

    rows: list[tuple[int, int, list[int]]]  # each one's last token, the position of that, its table
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceTokenOrder:
    """Tokens of the batch that the step before chooses, perhaps at this moment: rank 0 hands them on from device to
    device. See FedTokens."""

    num_chosen: int  # that are handed on: one for each row of the step before, in their order
    sources: list[int]  # which of these
    places: list[int]  # among the tokens of the batch


@dataclass(slots=True)
class Orders:
    """Carried out in this order, then the step's batch is computed, if there is one. The parts of rank 0 that have
    something to order add to the lists; whoever leads the step sends it, and it is not changed after that."""

    incoming_transfers: list[IncomingTransferOrder] = field(default_factory=list)
    tiers: list[TierOrders] = field(default_factory=list)  # before anything is written to the pool
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks: source, target
    served_fetches: list[BeginOrder] = field(
        default_factory=list
    )  # prefixes that others pull: all of each is in the pool
    begins: list[BeginOrder] = field(default_factory=list)
    ships: list[ShipOrder] = field(default_factory=list)
    commits: list[CommitOrder] = field(default_factory=list)
    aborts: list[HandoffKey] = field(default_factory=list)  # no longer wanted
    rows: list[HandoffKey | None] = field(default_factory=list)  # where each of the batch is shipped
    device_tokens: DeviceTokenOrder | None = None  # of the batch
    draft: DraftOrder | None = None  # and no batch
    stop: bool = False  # the replica ends

    def __bool__(self) -> bool:
        return self != _NOTHING

    @property
    def reads_pool(self) -> bool:
        """Whether the bytes of blocks leave the pool, before the batch is computed."""
        return bool(self.tiers or self.served_fetches or self.begins or self.ships)


_NOTHING = Orders()
