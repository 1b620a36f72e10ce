"""One handoff on its way out of one rank. Pure: it knows no bytes, and no link but as somebody who carries.

An outlet is a passage's part through one link:

    SENDING ──commit announced──> COMMITTED ──landed──> LANDED
       │                              │
       └─ refused, aborted, link failed, no answer in time ──> FAILED

The caller's blocks are read only between `start_reading` and `stop_reading`, while a segment is packed. An outlet that
ends in between counts as ended for everyone else at once, and for its passage when the reading is over: so blocks are
never given back while a thread still reads them, and never kept because a thread is stuck in the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from core.types.errors import HandoffExpired, TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import CommitFrame, SegmentFrame
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.protocol.segment import Segment, combine_checksums


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What one rank's part of a handoff came to."""

    handoff: str
    epoch: int
    wire_bytes: int  # payloads and announcements
    seconds: float  # from its beginning on this rank to the last acknowledgement: with the computation meanwhile
    link_s: float  # what the busiest of its links was at work for it: packing, and waiting for the wire
    error: TransferError | None = None  # None: it has landed


@dataclass(frozen=True)
class Ending:
    """The last that a passage sends: how far it came, and what comes after."""

    num_tokens: int
    next_tokens: tuple[int, ...]
    features: bytes = b""


class Carrier(Protocol):
    """A link to one receiving rank, as its outlets see it."""

    def put(self, link_transfer: LinkTransfer, item: Segment | Ending) -> None:
        """Send this after everything that was put before."""
        ...

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        """Fail this outlet; the others go on."""
        ...


class LinkTransferState(StrEnum):
    SENDING = "sending"
    COMMITTED = "committed"
    LANDED = "landed"
    FAILED = "failed"


class LinkTransfer:
    """One handoff's part that goes through one link. The carrier holds a lock over every change of state."""

    def __init__(self, transfer: RankTransfer, copy: HeadCopy, carrier: Carrier) -> None:
        self.transfer = transfer
        self.copy = copy
        self.state = LinkTransferState.SENDING
        self.error: TransferError | None = None
        self.wire_bytes = 0
        self.link_s = 0.0
        self.num_put = 0  # segments given to the carrier, which belongs to the thread that hands them over
        self.num_sent = 0  # of these; belongs to the carrier's thread
        self._carrier = carrier
        self._checksums: list[int] = []
        self._is_reading = False

    @property
    def key(self) -> HandoffKey:
        return self.transfer.key

    @property
    def is_ended(self) -> bool:
        return self.state in (LinkTransferState.LANDED, LinkTransferState.FAILED)

    @property
    def is_over(self) -> bool:
        """Ended, and the caller's blocks are not being read any more."""
        return self.is_ended and not self._is_reading

    def send(self, segment: Segment) -> None:
        self.num_put += 1
        self._carrier.put(self, replace(segment, first_head=self.copy.sender_head, num_heads=self.copy.num_heads))

    def commit(self, ending: Ending) -> None:
        """Rank 0 alone is told the next tokens."""
        self._carrier.put(self, ending if self.copy.receiver == 0 else replace(ending, next_tokens=()))

    def abort(self, error: TransferError) -> None:
        self._carrier.abort(self, error)

    # For the carrier.

    def start_reading(self) -> bool:
        """The carrier is about to read the blocks. False: it must not, and need not."""
        self._is_reading = not self.is_ended
        return self._is_reading

    def stop_reading(self) -> None:
        self._is_reading = False

    def announce(self, segment: Segment, *, num_bytes: int, checksum: int) -> SegmentFrame:
        """The frame that goes before a payload."""
        handoff, epoch = self.key
        number = len(self._checksums)
        self._checksums.append(checksum)
        return SegmentFrame(
            handoff=handoff, epoch=epoch, number=number, segment=segment, num_bytes=num_bytes, checksum=checksum
        )

    def announce_commit(self, ending: Ending) -> CommitFrame:
        """The frame after the last payload. The outlet must not have ended."""
        assert not self.is_ended
        self.state = LinkTransferState.COMMITTED
        handoff, epoch = self.key
        return CommitFrame(
            handoff=handoff,
            epoch=epoch,
            num_segments=len(self._checksums),
            checksum=combine_checksums(self._checksums),
            num_tokens=ending.num_tokens,
            next_tokens=ending.next_tokens,
            features=ending.features,
        )

    def landed(self) -> None:
        """The receiving rank says that it has all of it."""
        if self.state is LinkTransferState.COMMITTED:  # else it speaks of something that we did not say
            self.state = LinkTransferState.LANDED

    def fail(self, error: TransferError) -> None:
        """Not to be landed any more. The first end counts."""
        if not self.is_ended:
            self.state, self.error = LinkTransferState.FAILED, error


class RankTransfer:
    """All outlets of one handoff on this rank. Handed layer after layer by the thread that computes or orders them.

    `blocks` is the sequence's table from position 0 on; the caller keeps the blocks until the passage is over, which is
    for its outlets' carriers to notice. Layers are sent together until they have `group_rows` rows, a row being one
    position of one layer: short prompts so go in one message, long ones in groups of layers.
    """

    def __init__(
        self,
        handoff: Handoff,
        blocks: Sequence[int],
        *,
        layout: KVLayout,
        begun_at: float = 0.0,
        group_rows: int = 1 << 16,
    ) -> None:
        """begun_at: on the caller's clock."""
        self.handoff = handoff
        self.blocks = tuple(blocks)
        self.link_transfers: list[LinkTransfer] = []
        self._layout = layout
        self._begun_at = begun_at
        self._group_rows = group_rows
        self._group: Segment | None = None  # layers handed over and not yet sent

    @property
    def key(self) -> HandoffKey:
        return self.handoff.id, self.handoff.epoch

    @property
    def is_idle(self) -> bool:
        """Everything handed over so far has been sent."""
        return all(link_transfer.num_put == link_transfer.num_sent for link_transfer in self.link_transfers)

    @property
    def is_over(self) -> bool:
        """It has landed or failed, and no block is being read any more. Stays so."""
        return all(link_transfer.is_over for link_transfer in self.link_transfers)

    def all_layers_ready(self, first_token: int, end_token: int) -> None:
        """The KV of positions [first_token, end_token) is in the pool, and has been: however many these are, no payload
        is larger than of what is handed over as it is computed."""
        for first in range(max(first_token, self.handoff.first_token), end_token, self._group_rows):
            for layer in range(self._layout.num_layers):
                self.layer_ready(layer, first, min(first + self._group_rows, end_token))

    def layer_ready(self, layer: int, first_token: int, end_token: int) -> None:
        """The KV of positions [first_token, end_token) is in the pool for this layer."""
        first_token = max(first_token, self.handoff.first_token)
        num_tokens = end_token - first_token
        if num_tokens <= 0:
            return
        group = self._group
        if group and (group.first_token, group.num_tokens, group.layers.stop) == (first_token, num_tokens, layer):
            group = replace(group, num_layers=group.num_layers + 1)
        else:
            self._flush()
            group = Segment(
                first_layer=layer,
                num_layers=1,
                first_token=first_token,
                num_tokens=num_tokens,
                first_head=0,
                num_heads=self._layout.heads_per_rank,
            )
        self._group = group
        if num_tokens * group.num_layers >= self._group_rows or group.layers.stop == self._layout.num_layers:
            self._flush()

    def commit(self, num_tokens: int, next_tokens: Sequence[int] = (), *, features: bytes = b"") -> None:
        """Positions up to num_tokens have been handed over, and nothing more comes. Rank 0 adds the next tokens, and
        what is known of the last position."""
        self._flush()
        for link_transfer in self.link_transfers:
            link_transfer.commit(Ending(num_tokens, tuple(next_tokens), features))

    def abort(self) -> None:
        """It is not wanted any more."""
        for link_transfer in self.link_transfers:
            link_transfer.abort(HandoffExpired(f"handoff {self.handoff.id} was aborted"))

    def shipment(self, now: float) -> Shipment:
        """What it came to, once it is over."""
        return Shipment(
            handoff=self.handoff.id,
            epoch=self.handoff.epoch,
            wire_bytes=sum(link_transfer.wire_bytes for link_transfer in self.link_transfers),
            seconds=now - self._begun_at,
            link_s=max((link_transfer.link_s for link_transfer in self.link_transfers), default=0.0),
            error=next((link_transfer.error for link_transfer in self.link_transfers if link_transfer.error), None),
        )

    def _flush(self) -> None:
        group, self._group = self._group, None
        if group:
            for link_transfer in self.link_transfers:
                link_transfer.send(group)
