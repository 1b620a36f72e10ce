"""What a router knows of each replica: whether it has room, and what it is as a candidate for one request. Pure.

A request waits in the router as long as it can: there it keeps its turn by priority and tenant, and can still go to
whichever replica is free first. The blocks that it is predicted to need are promised to it for as long as it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from core.index.membership import Member
from core.index.prefix_index import Depths
from core.types.step_timing import StepTiming
from router.routing.policy import CandidateReplica

_MAX_BACKLOG_S = 1.0  # so much work in hand keeps a prefill replica busy until it has told us of its progress
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9
_DEFAULT_HOST_BYTES_PER_S = 4e9  # from a replica's memory to its device
_DEFAULT_DISK_BYTES_PER_S = 5e8


# Not frozen: a frozen dataclass sets each field by a call.
@dataclass(kw_only=True, slots=True)
class ReplicaLoad:
    """A replica at one moment, the same for every request: its own account, and what it has been asked since.

    A rate of 0 was not measured yet.
    """

    member: Member
    available_blocks: int  # free, or cached and unused
    promised_blocks: int  # to requests of this router: what they hold and what they are predicted to grow by
    promised_streams: int
    num_streams: int  # running and waiting as it last said, or of ours if that is more
    num_told_streams: int  # as it last said
    num_waiting: int  # of these, requests that it could not take up yet
    queued_tokens: int  # of prompts, as it last said, or of ours if that is more
    prefill_tokens_per_s: float
    decode_step_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    timing: StepTiming | None  # None: not learnt yet
    tokens_per_row: float = 0.0  # that a row of a step gets: with drafts more than 1
    drafted_per_row: float = 0.0  # tokens that it computes beside its own
    num_reported_local_decodes: int = 0  # of a prefill replica: choices that it answers itself, as it last said
    num_waiting_local_decodes: int = 0
    local_decode_blocks: int = 0  # that these have

    @property
    def replica(self) -> str:
        return self.member.replica

    def has_room_to_decode(self, *, num_blocks: int, num_streams: int) -> bool:
        """Whether it would take them up at once, or only let them wait there instead of here. An idle replica has room
        for everything; what does not fit at all is refused elsewhere."""
        if self.free_streams == self.member.max_running:
            return True
        return num_blocks <= self.free_blocks and num_streams <= self.free_streams and not self.num_waiting

    def has_room_for_local_decode(self, *, num_blocks: int, num_streams: int) -> bool:
        """Whether a prefill replica would answer them itself at once."""
        return (
            num_streams <= self.free_local_decodes
            and num_blocks <= self.free_local_decode_blocks
            and not self.num_waiting_local_decodes
        )

    @property
    def free_local_decodes(self) -> int:
        return max(0, self.member.max_local_decodes - max(self.num_reported_local_decodes, self.promised_streams))

    @property
    def free_local_decode_blocks(self) -> int:
        """Within their share, and not taken by prompts."""
        own = self.member.max_local_decode_blocks - max(self.local_decode_blocks, self.promised_blocks)
        return max(0, min(own, self.available_blocks))

    @property
    def free_streams(self) -> int:
        return self.member.max_running - max(self.num_told_streams, self.promised_streams)

    @property
    def free_blocks(self) -> int:
        return self.member.num_blocks - max(self.member.num_blocks - self.available_blocks, self.promised_blocks)

    @property
    def has_room_to_prefill(self) -> bool:
        return self.queued_tokens <= _MAX_BACKLOG_S * (self.prefill_tokens_per_s or _DEFAULT_PREFILL_TOKENS_PER_S)


@dataclass(frozen=True)
class UsualRates:
    """What to assume of a replica that has not measured something yet: what the others have, or a default."""

    prefill_tokens_per_s: float
    step_s: float
    link_bytes_per_s: float
    tokens_per_row: float = 1.0
    drafted_per_row: float = 0.0

    @classmethod
    def of(cls, loads: Sequence[ReplicaLoad]) -> UsualRates:
        measured = [load for load in loads if load.tokens_per_row]
        return cls(
            _mean([load.prefill_tokens_per_s for load in loads], _DEFAULT_PREFILL_TOKENS_PER_S),
            _mean([load.decode_step_s for load in loads], _DEFAULT_STEP_S),
            _mean([load.link_bytes_per_s for load in loads], _DEFAULT_LINK_BYTES_PER_S),
            _mean([load.tokens_per_row for load in loads], 1.0),
            fmean(load.drafted_per_row for load in measured) if measured else 0.0,  # of some it is 0
        )


def candidate_of(load: ReplicaLoad, held: Depths, usual: UsualRates) -> CandidateReplica:
    """`held`: how many leading blocks of the prompt the index finds there."""
    tokens_per_s = load.prefill_tokens_per_s or usual.prefill_tokens_per_s
    return CandidateReplica(
        replica=load.replica,
        cached_tokens=held.device * load.member.block_size,
        stored_tokens=held.disk * load.member.block_size,
        queue_s=load.queued_tokens / tokens_per_s,
        num_streams=load.num_streams,
        num_blocks=load.member.num_blocks,
        available_blocks=load.available_blocks,
        timing=load.timing or StepTiming(base_s=usual.step_s, token_s=1 / tokens_per_s),
        max_batch_tokens=load.member.max_batch_tokens,
        link_bytes_per_s=load.link_bytes_per_s or usual.link_bytes_per_s,
        restore_bytes_per_s=_restore_bytes_per_s(held, load),
        tokens_per_row=max(1.0, load.tokens_per_row or usual.tokens_per_row),
        drafted_per_row=load.drafted_per_row if load.tokens_per_row else usual.drafted_per_row,
    )


def _restore_bytes_per_s(held: Depths, load: ReplicaLoad) -> float:
    """At which rate this prefix comes back from where it lies below the device; 0: nothing of it does."""
    from_host, from_disk = held.host - held.device, held.disk - held.host
    if not (from_host or from_disk):
        return 0.0
    block_s = from_host / (load.host_bytes_per_s or _DEFAULT_HOST_BYTES_PER_S)
    block_s += from_disk / (load.disk_bytes_per_s or _DEFAULT_DISK_BYTES_PER_S)
    return (from_host + from_disk) / block_s


def _mean(values: Sequence[float], default: float) -> float:
    """Of what was measured."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
