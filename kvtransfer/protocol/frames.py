"""Control frames that accompany a link's payloads: openings, segments and commits. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.types.handoff import Handoff
from kvtransfer.protocol.segment import Segment


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Positions that a handoff may fill, and the receiving replica's blocks that store them."""

    handoff: str  # its id
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
    num_segments: int
    checksum: int  # over the segments' checksums, in order
    num_tokens: int  # end position sent; positions before first_token count
    next_tokens: tuple[int, ...] = ()  # from rank 0 to rank 0 only
    # Draft-head features of the last position (engine.spec_decode.heads.features); empty: unknown.
    features: bytes = b""
