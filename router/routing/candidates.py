"""Inputs and outputs of a routing decision, and the load of each replica. Pure; the simulator uses them, too.

Requests wait in the router, not on a replica. The router orders them by tenant, user and priority, and sends each to
the replica that has room first. While a request runs, its predicted blocks stay reserved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from core.index.prefix_index import Depths
from core.model.kv_memory import CacheShape
from core.types.step_timing import StepTiming

if TYPE_CHECKING:
    from core.index.membership import Member

MAX_BACKLOG_S = 1.0  # backlog that keeps a prefill replica busy until its next report
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9
_DEFAULT_HOST_BYTES_PER_S = 4e9  # host memory to device
_DEFAULT_DISK_BYTES_PER_S = 5e8


# Not frozen: a decision makes hundreds of candidates, and a frozen dataclass sets each field by a call.
@dataclass(kw_only=True, slots=True)
class CandidateReplica:
    """State of one replica with respect to one prompt."""

    replica: str
    cached_tokens: int  # prefix tokens cached on the device, including blocks of prompts queued before this one
    stored_tokens: int  # prefix tokens on the device or in a lower tier; at least cached_tokens
    queue_s: float  # time to compute the prompts already queued
    num_streams: int  # running and waiting sequences
    num_blocks: int  # total KV blocks
    available_blocks: int  # free blocks, and cached blocks that no sequence uses
    timing: StepTiming  # step time model
    is_learnt: bool = True  # `timing` comes from the replica's own steps, not from others or defaults
    max_batch_tokens: int  # token limit of a step; longer prompts take several steps
    link_bytes_per_s: float  # rate of outgoing KV
    # Prefix tokens on the device, including blocks without a checkpoint to continue from; 0: same as cached_tokens.
    held_tokens: int = 0
    restore_bytes_per_s: float = 0.0  # rate from lower tiers to the device; 0: no lower tiers
    tokens_per_row: float = 1.0  # tokens that a step yields per sequence; above 1 with drafts
    drafted_per_row: float = 0.0  # draft tokens that a step computes per sequence

    def compute_s(self, demand: RoutingRequest, after: int) -> float:
        """Predict the seconds to compute the prompt when the KV of its first `after` tokens is present."""
        # The last token is always computed, even if the whole prompt is cached, because its logits are needed.
        missing = max(1, demand.num_tokens - after)
        return self.timing.prefill_s(missing, after=demand.num_tokens - missing, chunk=self.max_batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequest:
    """Request as seen by a policy."""

    num_tokens: int
    cache: CacheShape  # bytes to ship
    max_local_tokens: int  # maximum number of uncached tokens that a decode replica computes itself


@dataclass(kw_only=True, slots=True)
class Option:
    """One way to serve the request, with its predicted cost in seconds."""

    prefill: str | None  # None: the decode replica computes the prompt itself
    decode: str
    wait_s: float = 0.0  # wait for room on the decode replica, including that of the other queued requests
    queue_s: float = 0.0  # queue of the replica that computes the prompt
    fetch_from: str | None = None  # source of missing blocks: a peer, or the replica itself for its lower tier
    fetch_tokens: int = 0  # prefix tokens present after the fetch
    fetch_s: float = 0.0  # fetch time; overlaps queue_s
    compute_s: float = 0.0  # prefill of the tokens still missing after the fetch
    keep_s: float = 0.0  # future cost of the cached blocks that this prompt evicts
    transfer_s: float = 0.0  # KV transfer from prefill to decode replica
    stall_s: float = 0.0  # delay of the decode replica's streams by a local prefill
    decode_s: float = 0.0  # first tokens of the answer, including the delay of other streams

    @property
    def ttft_s(self) -> float:
        """Time from admission to the first token."""
        return max(self.queue_s, self.fetch_s) + self.compute_s

    @property
    def cost_s(self) -> float:
        return self.wait_s + self.ttft_s + self.keep_s + self.transfer_s + self.stall_s + self.decode_s


class Policy(Protocol):
    """Routing policy. Owned by one router, on its event loop."""

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        """Return the ways to serve the request, best first; empty if there is no decode replica."""
        ...


# Not frozen: a frozen dataclass sets each field by a call.
@dataclass(kw_only=True, slots=True)
class ReplicaLoad:
    """Snapshot of one replica: its last report, combined with this router's reservations since.

    A rate of 0 has not been measured yet.
    """

    member: Member
    available_blocks: int  # free blocks, and cached blocks that no sequence uses
    promised_blocks: int  # blocks reserved by this router, predicted growth included
    promised_streams: int
    num_streams: int  # running and waiting sequences: the greater of the report and this router's count
    num_reported_streams: int  # running and waiting sequences in the last report
    num_waiting: int  # reported sequences that wait for room
    queued_tokens: int  # queued prompt tokens: the greater of the report and this router's count
    prefill_tokens_per_s: float
    decode_step_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    timing: StepTiming | None  # None: not learnt yet
    tokens_per_row: float = 0.0  # tokens that a step yields per sequence; above 1 with drafts
    drafted_per_row: float = 0.0  # draft tokens that a step computes per sequence
    num_reported_local_decodes: int = 0  # choices that a prefill replica decodes itself, in the last report
    num_waiting_local_decodes: int = 0
    local_decode_blocks: int = 0  # blocks that local decodes hold

    @property
    def replica(self) -> str:
        return self.member.replica

    def has_room_to_decode(self, *, num_blocks: int, num_streams: int) -> bool:
        """Return whether the replica would at once run `num_streams` more streams with `num_blocks` blocks.

        An idle replica always has room; `Reservations.check_fit` rejects requests that never fit.
        """
        if self.free_streams == self.member.max_running:
            return True
        return num_blocks <= self.free_blocks and num_streams <= self.free_streams and not self.num_waiting

    def has_room_for_local_decode(self, *, num_blocks: int, num_streams: int) -> bool:
        """Return whether a prefill replica would at once decode `num_streams` more streams itself."""
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
        """Blocks free for local decodes: within their limit, and not used by prompts."""
        own = self.member.max_local_decode_blocks - max(self.local_decode_blocks, self.promised_blocks)
        return max(0, min(own, self.available_blocks))

    @property
    def free_streams(self) -> int:
        return self.member.max_running - max(self.num_reported_streams, self.promised_streams)

    @property
    def free_blocks(self) -> int:
        return self.member.num_blocks - max(self.member.num_blocks - self.available_blocks, self.promised_blocks)

    @property
    def has_room_to_prefill(self) -> bool:
        return self.queued_tokens <= MAX_BACKLOG_S * (self.prefill_tokens_per_s or _DEFAULT_PREFILL_TOKENS_PER_S)


@dataclass(frozen=True)
class UsualRates:
    """Rates assumed for a replica that has not measured its own: the mean of the others, or a default."""

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
            fmean(load.drafted_per_row for load in measured) if measured else 0.0,  # a measured 0 counts
        )


def candidate_of(load: ReplicaLoad, held: Depths, usual: UsualRates) -> CandidateReplica:
    """Combine a replica's load with the prompt's prefix there.

    held: number of leading blocks of the prompt that the index finds on the replica, by tier.
    """
    tokens_per_s = load.prefill_tokens_per_s or usual.prefill_tokens_per_s
    return CandidateReplica(
        replica=load.replica,
        cached_tokens=held.device * load.member.block_size,
        stored_tokens=held.disk * load.member.block_size,
        held_tokens=held.blocks * load.member.block_size if load.member.state_bytes else 0,
        queue_s=load.queued_tokens / tokens_per_s,
        num_streams=load.num_streams,
        num_blocks=load.member.num_blocks,
        available_blocks=load.available_blocks,
        timing=load.timing or StepTiming(base_s=usual.step_s, token_s=1 / tokens_per_s),
        is_learnt=load.timing is not None,
        max_batch_tokens=load.member.max_batch_tokens,
        link_bytes_per_s=load.link_bytes_per_s or usual.link_bytes_per_s,
        restore_bytes_per_s=_restore_bytes_per_s(held, load),
        tokens_per_row=max(1.0, load.tokens_per_row or usual.tokens_per_row),
        drafted_per_row=load.drafted_per_row if load.tokens_per_row else usual.drafted_per_row,
    )


def _restore_bytes_per_s(held: Depths, load: ReplicaLoad) -> float:
    """Return the rate at which the prefix is restored from the lower tiers; 0 if they hold none of it."""
    from_host, from_disk = held.host - held.device, held.disk - held.host
    if not (from_host or from_disk):
        return 0.0
    block_s = from_host / (load.host_bytes_per_s or _DEFAULT_HOST_BYTES_PER_S)
    block_s += from_disk / (load.disk_bytes_per_s or _DEFAULT_DISK_BYTES_PER_S)
    return (from_host + from_disk) / block_s


def _mean(values: Sequence[float], default: float) -> float:
    """Average the measured (positive) values."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
