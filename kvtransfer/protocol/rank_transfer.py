"""Outgoing transfer of one handoff from one rank, and its link transfers, one per link. States: docs/HANDOFF.md.

Pure: no I/O; links are abstracted as `Carrier`. The caller's blocks are read only between `start_reading` and
`stop_reading`, while a segment is packed. A link transfer that ends in between keeps its rank transfer open until
`stop_reading`. So no blocks are freed while a thread reads them, nor held because a thread is stuck in the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from core.types.errors import HandoffExpired, TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import CommitFrame, Segment, SegmentFrame, combine_checksums
from kvtransfer.protocol.plan import HeadCopy


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """Result of one rank's part of a handoff."""

    handoff: str
    epoch: int
    wire_bytes: int  # payloads and announcements
    seconds: float  # from `begin` on this rank to the last acknowledgement, including overlapped computation
    link_s: float  # busy time of the rank's busiest link: packing, and waiting for the wire
    error: TransferError | None = None  # None: landed


class Carrier(Protocol):
    """Interface that link transfers use to reach a link."""

    def put(self, link_transfer: LinkTransfer, item: Segment | CommitFrame) -> None:
        """Queue `item` for sending. Items are sent in order; the commit is the last one."""
        ...

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        """Fail this link transfer only; others on the link continue."""
        ...


class LinkTransfer:
    """Part of a handoff that goes through one link. The carrier locks every state change."""

    def __init__(self, transfer: RankTransfer, copy: HeadCopy, carrier: Carrier) -> None:
        self.transfer = transfer
        self.copy = copy
        self.error: TransferError | None = None
        self.wire_bytes = 0
        self.link_s = 0.0
        self.num_put = 0  # segments queued; written by the computing thread
        self.num_sent = 0  # segments sent; written by the carrier's thread
        self._carrier = carrier
        self._checksums: list[int] = []
        self._is_reading = self._is_committed = self._has_landed = False

    @property
    def key(self) -> HandoffKey:
        return self.transfer.key

    @property
    def is_ended(self) -> bool:
        return self._has_landed or self.error is not None

    @property
    def is_over(self) -> bool:
        """Return whether the link transfer has ended and no thread reads the caller's blocks."""
        return self.is_ended and not self._is_reading

    def send(self, segment: Segment) -> None:
        """Queue a segment, unless this link carries nothing of it."""
        if self.transfer.has_rows(segment, self.copy):
            self.num_put += 1
            self._carrier.put(self, segment)

    def commit(self, commit: CommitFrame) -> None:
        """Queue the end of the transfer. Only rank 0 receives the next tokens."""
        self._carrier.put(self, commit if self.copy.receiver == 0 else replace(commit, next_tokens=()))

    def abort(self, error: TransferError) -> None:
        self._carrier.abort(self, error)

    # Called by the carrier.

    def start_reading(self) -> bool:
        """Mark the blocks as being read. Returns False if the transfer has ended: the carrier must not read them."""
        self._is_reading = not self.is_ended
        return self._is_reading

    def stop_reading(self) -> None:
        self._is_reading = False

    def announce(self, segment: Segment, *, num_bytes: int, checksum: int) -> SegmentFrame:
        """Return the frame to send before a payload."""
        handoff, epoch = self.key
        number = len(self._checksums)
        self._checksums.append(checksum)
        return SegmentFrame(
            handoff=handoff, epoch=epoch, number=number, segment=segment, num_bytes=num_bytes, checksum=checksum
        )

    def announce_commit(self, commit: CommitFrame) -> CommitFrame:
        """Return the frame to send after the last payload. The link transfer must not have ended."""
        assert not self.is_ended
        self._is_committed = True
        return replace(commit, num_segments=len(self._checksums), checksum=combine_checksums(self._checksums))

    def landed(self) -> None:
        """Record the receiving rank's acknowledgement."""
        if self._is_committed and not self.is_ended:  # ignore an acknowledgement of a commit never sent
            self._has_landed = True

    def fail(self, error: TransferError) -> None:
        """Mark as failed. Idempotent; the first outcome wins."""
        if not self.is_ended:
            self.error = error


class RankTransfer:
    """Transfer of one handoff from this rank over all its links. The computing thread adds layer after layer.

    `blocks` is the sequence's block table from position 0 on; the caller holds the blocks until `is_over`, which the
    carriers observe. Layers are batched into a segment until it has `group_rows` rows (one position of one layer):
    a short prompt needs one message, a long one several groups of layers.
    """

    def __init__(
        self,
        handoff: Handoff,
        blocks: Sequence[int],
        *,
        layout: KVLayout,
        state_slot: int | None = None,
        begun_at: float = 0.0,
        group_rows: int = 1 << 16,
        group_states: int = 1,
    ) -> None:
        """state_slot: the sequence's. begun_at: start time in seconds on the caller's clock.

        group_rows: see the class. group_states: parts of states per segment; see KVLayout.state_parts.
        """
        self.handoff = handoff
        self.blocks = tuple(blocks)
        self.state_slot = state_slot
        self._group_states = group_states
        self.link_transfers: list[LinkTransfer] = []
        self._layout = layout
        self._window_start = layout.cache.window_start(handoff.num_tokens, held=handoff.first_token)
        self._begun_at = begun_at
        self._group_rows = group_rows
        self._group: Segment | None = None  # layers added and not yet queued

    @property
    def key(self) -> HandoffKey:
        return self.handoff.key

    @property
    def is_idle(self) -> bool:
        """Return whether everything queued so far has been sent."""
        return all(link_transfer.num_put == link_transfer.num_sent for link_transfer in self.link_transfers)

    @property
    def is_over(self) -> bool:
        """Return whether the rank transfer has landed or failed and no block is being read. Final once true."""
        return all(link_transfer.is_over for link_transfer in self.link_transfers)

    def all_layers_ready(self, first_token: int, end_token: int) -> None:
        """Send positions [first_token, end_token), whose KV was computed earlier, for all layers.

        Splits the range so that payloads stay as small as in a transfer that overlaps with computation.
        """
        for first in range(max(first_token, self.handoff.first_token), end_token, self._group_rows):
            for layer in range(self._layout.num_layers):
                self.layer_ready(layer, first, min(first + self._group_rows, end_token))

    def layer_ready(self, layer: int, first_token: int, end_token: int) -> None:
        """Send positions [first_token, end_token) of one layer, whose KV is in the pool."""
        first_token = max(first_token, self.handoff.first_token)
        num_tokens = end_token - first_token
        if num_tokens <= 0:
            return
        group = self._group
        if group and (group.first_token, group.num_tokens, group.layers.stop) == (first_token, num_tokens, layer):
            group = replace(group, num_layers=group.num_layers + 1)
        else:
            self._flush()
            group = self._segment(layer, 1, first_token, num_tokens)
        self._group = group
        if num_tokens * group.num_layers >= self._group_rows or group.layers.stop == self._layout.num_layers:
            self._flush()

    def has_rows(self, segment: Segment, copy: HeadCopy) -> bool:
        """Return whether a link copies anything of a segment: positions before a window are not shipped."""
        if segment.num_window_tokens or not self._layout.windows:
            return copy.carries(segment)
        return any(copy.sender_heads[layer] for layer in segment.layers if not self._layout.is_windowed(layer))

    def commit(self, num_tokens: int, next_tokens: Sequence[int] = (), *, features: bytes = b"") -> None:
        """Send the state after the last position, and commit the transfer of positions up to num_tokens.

        Nothing may follow. Rank 0 adds the next tokens and the draft-head features of the last position.
        """
        self._flush()
        first, layout = self.handoff.first_token, self._layout
        for layer in range(layout.num_layers, layout.num_transferred, self._group_states):
            num_layers = min(self._group_states, layout.num_transferred - layer)
            # The ledger counts positions per layer, so one state counts as all positions of its layer.
            self._send(self._segment(layer, num_layers, first, num_tokens - first))
        handoff, epoch = self.key
        commit = CommitFrame(
            handoff=handoff, epoch=epoch, num_tokens=num_tokens, next_tokens=tuple(next_tokens), features=features
        )
        for link_transfer in self.link_transfers:
            link_transfer.commit(commit)

    def abort(self) -> None:
        """Fail every link transfer with HandoffExpired."""
        for link_transfer in self.link_transfers:
            link_transfer.abort(HandoffExpired(f"handoff {self.handoff.id} was aborted"))

    def shipment(self, now: float) -> Shipment:
        """Return the result. Valid once `is_over`."""
        return Shipment(
            handoff=self.handoff.id,
            epoch=self.handoff.epoch,
            wire_bytes=sum(link_transfer.wire_bytes for link_transfer in self.link_transfers),
            seconds=now - self._begun_at,
            link_s=max((link_transfer.link_s for link_transfer in self.link_transfers), default=0.0),
            error=next((link_transfer.error for link_transfer in self.link_transfers if link_transfer.error), None),
        )

    def _segment(self, first_layer: int, num_layers: int, first_token: int, num_tokens: int) -> Segment:
        return Segment(
            first_layer=first_layer,
            num_layers=num_layers,
            first_token=first_token,
            num_tokens=num_tokens,
            window_start=self._window_start,
        )

    def _flush(self) -> None:
        group, self._group = self._group, None
        if group:
            self._send(group)

    def _send(self, segment: Segment) -> None:
        for link_transfer in self.link_transfers:
            link_transfer.send(segment)
