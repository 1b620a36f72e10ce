"""A receiving rank's books of one handoff: what may still be written, and what has arrived. Pure: no bytes, no threads.

             segment, commit                close
    OPEN ──all sources committed──> LANDED ──────> CLOSED
     │                                                ^
     └──────────────────── close ─────────────────────┘

A frame of a newer epoch starts the books of an OPEN handoff anew, and fences the older epochs. LANDED is final for the
bytes: the KV of these positions is the same whoever computed it, so what a newer epoch sends is counted as here already
and thrown away. Therefore nothing is written any more once every rank has landed, and nobody need be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from core.types.errors import ChecksumMismatch, HandoffExpired, TransferError
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.segment import combine_checksums


class LedgerState(StrEnum):
    OPEN = "open"
    LANDED = "landed"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class Landing:
    """A handoff's KV is whole on one rank. What comes after it is known on rank 0 only."""

    handoff: str
    epoch: int
    num_tokens: int  # positions that are here now, those before the handoff included
    next_tokens: tuple[int, ...] = ()  # after a prompt: one per choice; of a moved sequence: those we do not know yet
    features: bytes = b""  # of the last of these positions, see engine.spec_decode.heads.features; empty: not known


@dataclass
class _Account:
    """What one sending rank has delivered under the current epoch."""

    reach: list[int]  # of each layer: the first position that has not arrived
    checksums: list[int] = field(default_factory=list)
    is_committed: bool = False


class Ledger:
    """Decides about every frame of one handoff on one rank. The caller holds a lock over a decision and its write."""

    def __init__(self, opened: Opening, *, num_layers: int) -> None:
        self.handoff = opened.handoff
        self.state = LedgerState.OPEN
        self.epoch = 0  # the newest that has been seen
        self._opened = opened
        self._num_layers = num_layers
        self._accounts: dict[int, _Account] = {}
        self._landed_tokens = 0
        self._next_tokens: tuple[int, ...] = ()
        self._features = b""
        self._sender = (-1, "")  # the newest epoch of which there is a frame, and the replica that it came from

    def admit(self, epoch: int, *, sender: str) -> None:
        """Before `accept` and `commit`: whether these frames are of the replica that the opening names, or else of the
        one that was the first of its epoch. Raises TransferError, and nothing has changed."""
        known, admitted = self._sender
        if (self._opened.sender or sender) != sender or (epoch == known and sender != admitted):
            raise TransferError(f"handoff {self.handoff}: epoch {epoch} comes from another replica than {sender}")
        if epoch > known:
            self._sender = epoch, sender

    def accept(self, frame: SegmentFrame, *, source: int) -> bool:
        """Book a segment of sending rank `source`. True: write it; False: it is here already.

        Raises HandoffExpired if the handoff is closed or the epoch fenced, ChecksumMismatch if one before it is
        missing, TransferError if it lies outside of what was opened. Then nothing may be written.
        """
        account = self._account(frame.epoch, source)
        if self.state is LedgerState.LANDED:
            return False
        segment, layers = frame.segment, frame.segment.layers
        if layers.stop > self._num_layers or segment.end_token > self._opened.max_tokens:
            raise TransferError(f"handoff {self.handoff}: segment {frame.number} lies outside of what was opened")
        reached = {account.reach[layer] for layer in layers}
        if frame.number != len(account.checksums) or reached != {segment.first_token}:
            raise ChecksumMismatch(f"handoff {self.handoff}: something is missing before segment {frame.number}")
        account.checksums.append(frame.checksum)
        account.reach[layers.start : layers.stop] = [segment.end_token] * len(layers)
        return True

    def commit(self, commit: CommitFrame, *, source: int, num_sources: int) -> Landing | None:
        """Sending rank `source` is done. The Landing when all `num_sources` of this rank are. Raises as `accept`."""
        account = self._account(commit.epoch, source)
        if self.state is LedgerState.LANDED:
            return self._confirm(commit)
        if commit.num_tokens < self._opened.num_tokens or {*account.reach} != {commit.num_tokens}:
            raise ChecksumMismatch(f"handoff {self.handoff}: commit before all of it arrived")
        if (len(account.checksums), combine_checksums(account.checksums)) != (commit.num_segments, commit.checksum):
            raise ChecksumMismatch(f"handoff {self.handoff}: what arrived is not what was sent")
        account.is_committed = True
        self._landed_tokens = commit.num_tokens
        self._next_tokens = commit.next_tokens or self._next_tokens
        self._features = commit.features or self._features
        if sum(account.is_committed for account in self._accounts.values()) < num_sources:
            return None
        self.state = LedgerState.LANDED
        return self._landing()

    def close(self) -> None:
        """Refuse everything from now on."""
        self.state = LedgerState.CLOSED

    def _account(self, epoch: int, source: int) -> _Account:
        """The books of one sending rank. A newer epoch fences the older ones and starts from nothing."""
        if self.state is LedgerState.CLOSED:
            raise HandoffExpired(f"handoff {self.handoff} is closed")
        if epoch < self.epoch:
            raise HandoffExpired(f"handoff {self.handoff}: epoch {epoch} is fenced by epoch {self.epoch}")
        if epoch > self.epoch:
            self.epoch, self._accounts = epoch, {}
            if self.state is LedgerState.OPEN:
                self._next_tokens, self._features = (), b""
        return self._accounts.setdefault(source, _Account([self._opened.first_token] * self._num_layers))

    def _confirm(self, commit: CommitFrame) -> Landing | None:
        """A commit of what is here already. A newer sender's next tokens count: the client hears of them from it."""
        if commit.num_tokens != self._landed_tokens:
            raise HandoffExpired(f"handoff {self.handoff}: {self._landed_tokens} positions have landed already")
        if not commit.next_tokens:
            return None
        self._next_tokens = commit.next_tokens
        return self._landing()

    def _landing(self) -> Landing:
        return Landing(
            handoff=self.handoff,
            epoch=self.epoch,
            num_tokens=self._landed_tokens,
            next_tokens=self._next_tokens,
            features=self._features,
        )
