"""Outgoing transfers of a replica: the handoffs that it is sending, tracked on rank 0. Pure. States: docs/HANDOFF.md.

A transfer holds its own reference to every block that it reads, from begin to end. So the owner of the sequence may
finish, cancel, preempt or free it at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from core.types.errors import TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.kv.window_manager import HeldParts, WindowManager
from kvtransfer.protocol.plan import sending_ranks
from kvtransfer.protocol.rank_transfer import Shipment

T = TypeVar("T")

# A duplicate call or report is late by one deadline at most, during which fewer handoffs end.
_MAX_ENDED = 4096


@dataclass(eq=False)
class OutgoingTransfer(Generic[T]):
    """One handoff that this replica sends for `owner`."""

    owner: T
    handoff: Handoff
    ranks: set[int]  # own ranks still sending
    blocks: list[int]
    state_slots: list[int]  # one, if the model has recurrent layers
    parts: HeldParts = field(default_factory=HeldParts)  # parts of `blocks` to read in layers with a window
    error: TransferError | None = None  # set once the transfer fails
    done: list[Shipment] = field(default_factory=list)

    @property
    def key(self) -> HandoffKey:
        return self.handoff.id, self.handoff.epoch

    @property
    def is_over(self) -> bool:
        return not self.ranks

    @property
    def shipment(self) -> Shipment:
        """Combined result of all ranks. Valid once `is_over`."""
        return Shipment(
            handoff=self.handoff.id,
            epoch=self.handoff.epoch,
            wire_bytes=sum(shipment.wire_bytes for shipment in self.done),
            seconds=max(shipment.seconds for shipment in self.done),
            link_s=max(shipment.link_s for shipment in self.done),
            error=self.error,
        )


class OutgoingTransfers(Generic[T]):
    """Registry of outgoing transfers. Owned by the step thread of rank 0."""

    def __init__(self, blocks: BlockManager, layout: KVLayout) -> None:
        """layout: this replica's."""
        self._blocks = blocks
        self._layout = layout
        self._claimed: set[HandoffKey] = set()  # of transfers that have not begun
        self._under_way: dict[HandoffKey, OutgoingTransfer[T]] = {}
        self._ended: OrderedDict[HandoffKey, None] = OrderedDict()
        self._aborts: list[HandoffKey] = []

    def __len__(self) -> int:
        return len(self._under_way)

    def knows(self, key: HandoffKey) -> bool:
        """Return whether a transfer with this key is claimed, is active or has ended.

        A key is used once: a late or duplicate report of the first transfer would end a second one while its blocks
        are still being read.
        """
        return key in self._claimed or key in self._under_way or key in self._ended

    def claim(self, key: HandoffKey) -> None:
        """Claim a new key for a transfer that begins later. `begin` or `release` ends the claim."""
        self._claimed.add(key)

    def release(self, key: HandoffKey) -> None:
        """End a claim whose transfer will not begin. Does nothing otherwise."""
        self._claimed.discard(key)

    def begin(
        self, handoff: Handoff, blocks: Sequence[int], *, state_slots: Sequence[int] = (), owner: T
    ) -> OutgoingTransfer[T]:
        """Register a transfer of `blocks` and `state_slots`, which takes its own references.

        The caller holds them during this call. The handoff's key must be new, or claimed for this transfer.
        """
        ranks = sending_ranks(self._layout, num_receivers=len(handoff.ranks))
        outgoing = OutgoingTransfer(owner, handoff, ranks, [], [])
        self.release(outgoing.key)
        assert not self.knows(outgoing.key), f"{outgoing.key} is under way, or was"
        self._under_way[outgoing.key] = outgoing
        if windows := self._blocks.windows:
            outgoing.parts.reserve(parts_of_handoff(handoff, windows), windows)
            first_seen = windows.first_seen(handoff.num_tokens)
            outgoing.parts.first = max(handoff.first_token // windows.block_size, first_seen)  # see window_start
        self.grow(outgoing, blocks, state_slots=state_slots)
        return outgoing

    def grow(self, outgoing: OutgoingTransfer[T], blocks: Sequence[int], *, state_slots: Sequence[int] = ()) -> None:
        """Replace the block table (from position 0 on) by `blocks`, a longer one, and reference the new blocks.

        state_slots: the state slot, once it is known which one the sequence ends in.
        """
        new = blocks[len(outgoing.blocks) :]
        self._blocks.share([*new, *state_slots])
        outgoing.blocks += new
        if windows := self._blocks.windows:
            # A sequence that this replica received has later blocks, with parts for the room reserved on arrival.
            end = -(-outgoing.handoff.max_tokens // windows.block_size)
            outgoing.parts.keep(blocks[:end], windows)
        outgoing.state_slots += state_slots

    def abort(self, outgoing: OutgoingTransfer[T], error: TransferError) -> None:
        """Abort sending, unless it has ended. It is over when every rank has reported; the first error wins."""
        if outgoing.error is None and outgoing.key in self._under_way:
            outgoing.error = error
            self._aborts.append(outgoing.key)

    def ended(self, rank: int, shipment: Shipment) -> OutgoingTransfer[T] | None:
        """Record that one rank has ended its part. Returns the transfer, or None for a duplicate report."""
        outgoing = self._under_way.get((shipment.handoff, shipment.epoch))
        if outgoing is None or rank not in outgoing.ranks:
            return None
        outgoing.ranks.discard(rank)
        outgoing.done.append(shipment)
        if shipment.error:
            self.abort(outgoing, shipment.error)
        if outgoing.is_over:
            del self._under_way[outgoing.key]
            self._ended[outgoing.key] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
            if self._blocks.windows:
                outgoing.parts.release(self._blocks.windows)
            self._blocks.free(outgoing.blocks + outgoing.state_slots)
        return outgoing

    def take_aborts(self) -> list[HandoffKey]:
        """Return and clear the keys of the transfers that the ranks must abort."""
        aborts, self._aborts = self._aborts, []
        return aborts


def parts_of_handoff(handoff: Handoff, windows: WindowManager) -> int:
    """Return the maximum number of parts that a transfer of `handoff` holds, and reserves when it begins."""
    num_more = -(-(handoff.max_tokens - handoff.num_tokens) // windows.block_size)
    return windows.num_for(handoff.num_tokens) + num_more
