"""Segments of KV that payloads carry, and the control frames that accompany them: openings and commits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.types.handoff import Handoff

# A slower link counts as broken. With a round trip of 40 ms and 1 % packet loss, CUBIC reaches 0.4 to 0.9 MB/s on
# 100 Mbit/s (docs/OPERATING.md, "Slow networks").
_MIN_BYTES_PER_S = 256 << 10


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Contiguous ranges of layers and positions.

    Layers with a window, if their blocks are freed, have only the positions from `window_start` on.
    """

    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    window_start: int = 0  # the same for all segments of a handoff; see CacheShape.window_start

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    @property
    def first_window_token(self) -> int:
        """First position of layers with a window."""
        return max(self.first_token, self.window_start)

    @property
    def num_window_tokens(self) -> int:
        """Number of positions of layers with a window."""
        return max(0, self.end_token - self.first_window_token)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Positions that a handoff may fill, and the receiving replica's blocks that store them."""

    handoff: str  # id of the handoff
    first_token: int = 0  # a multiple of the block size
    num_tokens: int  # minimum; a commit of fewer is rejected
    max_tokens: int
    block_ids: tuple[int, ...]  # from block first_token / block_size on
    state_slots: tuple[int, ...] = ()  # one, if the model has recurrent layers; see BlockManager
    # Sending replica. Empty: the first replica that sends under an epoch owns that epoch.
    sender: str = ""

    @classmethod
    def of(
        cls, handoff: Handoff, block_ids: Iterable[int], *, state_slots: Iterable[int] = (), sender: str = ""
    ) -> Opening:
        """Build the opening that a ticket describes."""
        return cls(
            handoff=handoff.id,
            first_token=handoff.first_token,
            num_tokens=handoff.num_tokens,
            max_tokens=handoff.max_tokens,
            block_ids=tuple(block_ids),
            state_slots=tuple(state_slots),
            sender=sender,
        )

    @property
    def exposed(self) -> tuple[int, ...]:
        """Blocks and state slot that a peer may write to."""
        return self.block_ids + self.state_slots


@dataclass(frozen=True, kw_only=True)
class SegmentFrame:
    """Announcement of one payload."""

    handoff: str
    epoch: int
    number: int  # consecutive from 0 per handoff, epoch and link
    segment: Segment
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class CommitFrame:
    """End of one sending rank's segments for one receiving rank."""

    handoff: str
    epoch: int
    num_segments: int = 0
    checksum: int = 0  # over the segments' checksums, in order
    num_tokens: int  # end position sent; positions before first_token count
    # From rank 0 to rank 0 only. After a prompt: one token per choice. After a migration: the tokens that the receiver
    # does not have yet.
    next_tokens: tuple[int, ...] = ()
    # Draft-head features of the last position (engine.spec_decode.heads.features); empty: unknown.
    features: bytes = b""


def combine_checksums(checksums: Iterable[int]) -> int:
    """Return a commit's checksum. It depends on the order of the segments' checksums."""
    return sum(value * (2 * i + 1) for i, value in enumerate(checksums)) % 2**64


def operation_timeout(timeout_s: float, num_bytes: int) -> float:
    """Return the timeout of one link operation in seconds.

    timeout_s: time for the peer to respond; the time to move `num_bytes` is added.
    """
    return timeout_s + num_bytes / _MIN_BYTES_PER_S
