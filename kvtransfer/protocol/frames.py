"""What is said beside the link: which positions a rank opens, what each payload holds, and when that is all. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.types.handoff import Handoff
from kvtransfer.protocol.segment import Segment


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a handoff may fill: positions, and the blocks of the opening replica that they go to."""

    handoff: str  # its id
    first_token: int = 0  # a multiple of the block size
    num_tokens: int  # at least so many; a commit of fewer is refused
    max_tokens: int  # there is room for so many
    block_ids: tuple[int, ...]  # of positions first_token / block_size onwards
    sender: str = ""  # the replica that it comes from; empty: of each epoch, the one that speaks first

    @classmethod
    def of(cls, handoff: Handoff, block_ids: Iterable[int], *, sender: str = "") -> Opening:
        """What the ticket promises."""
        return cls(
            handoff=handoff.id,
            first_token=handoff.first_token,
            num_tokens=handoff.num_tokens,
            max_tokens=handoff.max_tokens,
            block_ids=tuple(block_ids),
            sender=sender,
        )


@dataclass(frozen=True, kw_only=True)
class SegmentFrame:
    """Announces one payload."""

    handoff: str
    epoch: int
    number: int  # consecutive from 0 per handoff, epoch and link
    segment: Segment  # its heads are those of the rank that holds this object: the other one's never travel
    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class CommitFrame:
    """All segments of one sending rank for one receiving rank have been announced."""

    handoff: str
    epoch: int
    num_segments: int
    checksum: int  # over the segments' checksums, in order
    num_tokens: int  # positions of the handoff that have been sent, those before first_token included
    next_tokens: tuple[int, ...] = ()  # from rank 0 to rank 0
    features: bytes = b""  # see engine.spec_decode.heads.features: of the last of these positions; empty: not known
