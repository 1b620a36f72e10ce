"""Receiving rank's records of its handoffs: accepted segments and commits. Pure: no bytes, no threads.

docs/HANDOFF.md has the states. A frame of a newer epoch resets an OPEN handoff and fences the older epochs. LANDED is
final for the bytes: every sender computes the same KV for these positions, so segments of a newer epoch are
acknowledged and discarded. So nothing is written once every rank has landed, and no rank needs to be asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, TypeVar

from core.types.errors import ChecksumMismatch, HandoffExpired, TransferError
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame, combine_checksums
from kvtransfer.protocol.plan import HeadCopy

T = TypeVar("T")

# An Open overtaken by its Close arrives within a call's deadline, before thousands of other handoffs close.
_MAX_CLOSED = 4096


class LedgerState(StrEnum):
    OPEN = "open"
    LANDED = "landed"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True)
class Landing:
    """Report that a handoff's KV is complete on one rank. Only rank 0's carries next tokens and features."""

    handoff: str
    epoch: int
    num_tokens: int  # positions present now, including those before the handoff
    next_tokens: tuple[int, ...] = ()  # as in CommitFrame
    features: bytes = b""  # as in CommitFrame


@dataclass
class _Account:
    """Segments received from one sending rank under the current epoch."""

    reach: dict[int, int]  # by layer with heads from this rank: the first position that has not arrived
    checksums: list[int] = field(default_factory=list)
    is_committed: bool = False


class Ledger:
    """Accepts or rejects every frame of one handoff on one rank. The caller locks each decision with its write."""

    def __init__(self, opened: Opening, *, windowed: Collection[int] = (), window_start: int = 0) -> None:
        """windowed: layers that ship only positions from `window_start` on; see CacheShape.window_start."""
        self.handoff = opened.handoff
        self.state = LedgerState.OPEN
        self.epoch = 0  # newest seen
        self._opened = opened
        self._windowed = windowed
        self._window_start = window_start
        self._accounts: dict[int, _Account] = {}
        self._landing = Landing(handoff=opened.handoff, epoch=0, num_tokens=0)
        self._sender = (-1, "")  # newest epoch with an admitted frame, and its sending replica

    def admit(self, epoch: int, *, sender: str) -> None:
        """Check the sending replica of a frame; call this before `accept` and `commit`.

        The opening names the sender; if it does not, the first replica that sends under an epoch owns the epoch.
        Raises TransferError without changing any state.
        """
        newest_epoch, newest_sender = self._sender
        if (self._opened.sender or sender) != sender or (epoch == newest_epoch and sender != newest_sender):
            raise TransferError(
                f"handoff {self.handoff}: epoch {epoch} from {sender} rejected: another replica sends it"
            )
        if epoch > newest_epoch:
            self._sender = epoch, sender

    def accept(self, frame: SegmentFrame, *, copy: HeadCopy) -> bool:
        """Record a segment of a sending rank. Returns whether to write it; False if it is present already.

        copy: heads that the rank sends.

        Raises HandoffExpired if the handoff is closed or the epoch fenced, ChecksumMismatch if an earlier segment is
        missing, TransferError if it is outside the opening. Nothing may be written in these cases.
        """
        account = self._account(frame.epoch, copy)
        if self.state is LedgerState.LANDED:
            return False
        segment, layers = frame.segment, frame.segment.layers
        if layers.stop > len(copy.receiver_heads) or segment.end_token > self._opened.max_tokens:
            raise TransferError(f"handoff {self.handoff}: segment {frame.number} lies outside of the opening")
        if segment.window_start != self._window_start:
            raise TransferError(
                f"handoff {self.handoff}: segment {frame.number} ships windows from position {segment.window_start}, "
                f"not from {self._window_start}"
            )
        carried = {layer: segment.first_token for layer in layers if layer in account.reach}
        for layer in carried.keys() & self._windowed if self._windowed else ():
            carried[layer] = segment.first_window_token
            if not segment.num_window_tokens:
                del carried[layer]
        is_next = all(account.reach[layer] == first for layer, first in carried.items())
        if frame.number != len(account.checksums) or not (carried and is_next):
            raise ChecksumMismatch(f"handoff {self.handoff}: data is missing before segment {frame.number}")
        account.checksums.append(frame.checksum)
        account.reach.update(dict.fromkeys(carried, segment.end_token))
        return True

    def commit(self, commit: CommitFrame, *, copy: HeadCopy, num_sources: int) -> Landing | None:
        """Mark a sending rank as complete.

        Returns the Landing when all `num_sources` senders of this rank are complete. Raises as `accept` does.
        """
        account = self._account(commit.epoch, copy)
        if self.state is LedgerState.LANDED:
            return self._confirm(commit)
        if commit.num_tokens < self._opened.num_tokens or {*account.reach.values()} != {commit.num_tokens}:
            raise ChecksumMismatch(f"handoff {self.handoff}: commit arrived before all segments")
        if (len(account.checksums), combine_checksums(account.checksums)) != (commit.num_segments, commit.checksum):
            raise ChecksumMismatch(f"handoff {self.handoff}: received segments do not match the commit's checksum")
        account.is_committed = True
        self._landing = replace(
            self._landing,
            num_tokens=commit.num_tokens,
            next_tokens=commit.next_tokens or self._landing.next_tokens,
            features=commit.features or self._landing.features,
        )
        if sum(account.is_committed for account in self._accounts.values()) < num_sources:
            return None
        self.state = LedgerState.LANDED
        return self._landing

    def close(self) -> None:
        """Reject every later frame."""
        self.state = LedgerState.CLOSED

    def _account(self, epoch: int, copy: HeadCopy) -> _Account:
        """Return the account of one sending rank. A newer epoch fences the older ones and resets all accounts."""
        if self.state is LedgerState.CLOSED:
            raise HandoffExpired(f"handoff {self.handoff} is closed")
        if epoch < self.epoch:
            raise HandoffExpired(f"handoff {self.handoff}: epoch {epoch} is fenced by epoch {self.epoch}")
        if epoch > self.epoch:
            self.epoch, self._accounts = epoch, {}
            if self.state is LedgerState.OPEN:
                self._landing = Landing(handoff=self.handoff, epoch=epoch, num_tokens=0)
        if copy.sender not in self._accounts:
            first, window_first = self._opened.first_token, max(self._opened.first_token, self._window_start)
            reach = {layer: window_first if layer in self._windowed else first for layer in copy.layers}
            self._accounts[copy.sender] = _Account(reach)
        return self._accounts[copy.sender]

    def _confirm(self, commit: CommitFrame) -> Landing | None:
        """Confirm a commit of KV that landed earlier.

        A newer sender's next tokens replace the known ones, because this sender reports them to the client.
        """
        num_landed = self._landing.num_tokens
        if commit.num_tokens != num_landed:
            raise HandoffExpired(f"handoff {self.handoff}: {num_landed} positions have landed already")
        if not commit.next_tokens:
            return None
        self._landing = replace(self._landing, epoch=self.epoch, next_tokens=commit.next_tokens)
        return self._landing


class Register(Generic[T]):
    """Handoffs open on one rank, by id. Closing is final, even if Open arrives after Close.

    Not thread-safe: the owner locks each call.
    """

    def __init__(self) -> None:
        self._open: dict[str, T] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of the open handoffs."""
        return iter(self._open)

    def open(self, handoff: str, entry: T) -> None:
        """Add `entry` unless the handoff is closed or open already; the first entry holds the received data."""
        if handoff not in self._closed:
            self._open.setdefault(handoff, entry)

    def close(self, handoff: str) -> T | None:
        self._closed[handoff] = None
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        return self._open.pop(handoff, None)

    def get(self, handoff: str) -> T | None:
        return self._open.get(handoff)

    def find(self, handoff: str) -> T:
        """Return the open entry. Raises HandoffExpired."""
        if entry := self._open.get(handoff):
            return entry
        raise HandoffExpired(f"handoff {handoff} is not open here")
