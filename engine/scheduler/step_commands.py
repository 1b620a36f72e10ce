"""Commands that rank 0 sends to every rank of its replica with a step. Encoded by `worker.gang_runner`."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.types.handoff import Handoff, HandoffKey
from engine.tiers.commands import TierOrders


@dataclass(frozen=True, slots=True)
class BeginOrder:
    """Start of a handoff, and the part of it that is already in the pool."""

    handoff: Handoff
    blocks: list[int]  # the sequence's table, from position 0 on
    num_tokens: int  # number of leading positions whose KV is in the pool
    # Slot that has the state of the handoff's last position when it is committed. None: the model has no states, or a
    # ShipOrder will name the slot.
    state_slot: int | None = None


@dataclass(frozen=True, slots=True)
class ShipOrder:
    """Positions [start, end) to ship of a sequence that decodes during its transfer; earlier steps computed them."""

    key: HandoffKey
    blocks: list[int]  # block table, which may have grown
    start: int
    end: int
    state_slot: int | None = None  # slot of the state after position end - 1, if the model has states


@dataclass(frozen=True, slots=True)
class CommitOrder:
    """End of a handoff."""

    key: HandoffKey
    num_tokens: int  # positions shipped in total
    next_tokens: list[int]  # tokens that the receiver does not have


@dataclass(frozen=True, slots=True)
class IncomingTransferOrder:
    """KV of positions [start, end) that has arrived, with the features of the last position.

    See engine.spec_decode.heads.features. Rank 0 has recorded it already.
    """

    blocks: list[int]
    start: int
    end: int
    features: bytes


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """Start of a drafting pass by the heads: after every position rank 0 sends the tokens that it chose."""

    rows: list[tuple[int, int, list[int]]]  # per row: last token, its position, block table
    max_tokens: int


@dataclass(frozen=True, slots=True)
class DeviceTokenOrder:
    """Transfer of the tokens that the previous step, which may still be running, chooses and this batch computes.

    Rank 0 sends them from device to device. See `DeviceTokens`.
    """

    num_chosen: int  # number of tokens sent: one per row of the step before, in order
    sources: list[int]  # indices into the tokens sent
    places: list[int]  # indices into the tokens of the batch


@dataclass(slots=True)
class Orders:
    """Commands in order of execution. After them, ranks compute the step's batch, if there is one.

    Components of rank 0 append to the lists, and the leader sends the object, which is not changed afterwards.
    """

    incoming_transfers: list[IncomingTransferOrder] = field(default_factory=list)
    tiers: list[TierOrders] = field(default_factory=list)  # before any write to the pool
    # Parts of blocks in layers with a window: block, part. Before anything else reads or writes the pool.
    parts: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks: source, target
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # state slots: source, target
    # Prefixes that other replicas fetch; each is completely in the pool.
    served_fetches: list[BeginOrder] = field(default_factory=list)
    begins: list[BeginOrder] = field(default_factory=list)
    ships: list[ShipOrder] = field(default_factory=list)
    commits: list[CommitOrder] = field(default_factory=list)
    aborts: list[HandoffKey] = field(default_factory=list)  # no longer wanted
    rows: list[HandoffKey | None] = field(default_factory=list)  # handoff that each row of the batch is shipped to
    device_tokens: DeviceTokenOrder | None = None
    draft: DraftOrder | None = None  # excludes a batch
    stop: bool = False  # the replica shuts down

    def __bool__(self) -> bool:
        return self != _NOTHING

    @property
    def reads_pool(self) -> bool:
        """True if commands read blocks of the pool before the batch is computed."""
        return bool(self.tiers or self.served_fetches or self.begins or self.ships)


_NOTHING = Orders()
