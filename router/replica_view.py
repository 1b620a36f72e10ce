"""What a choice is told of a replica: its own account of itself, and what we have asked of it since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages import timing_from_proto
from cluster.timing import StepTiming
from router.policy import ReplicaView
from router.replicas import Replica

_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class Usual:
    """What to assume of a replica that has not measured something yet: what the others have, or a default."""

    prefill_tokens_per_s: float
    step_s: float
    link_bytes_per_s: float

    @classmethod
    def of(cls, replicas: Sequence[Replica]) -> Usual:
        statuses = [replica.status for replica in replicas]
        return cls(
            _mean([status.prefill_tokens_per_s for status in statuses], _DEFAULT_PREFILL_TOKENS_PER_S),
            _mean([status.decode_step_s for status in statuses], _DEFAULT_STEP_S),
            _mean([status.link_bytes_per_s for status in statuses], _DEFAULT_LINK_BYTES_PER_S),
        )


def view_of(replica: Replica, cached_blocks: int, usual: Usual) -> ReplicaView:
    """`cached_blocks`: how many leading blocks of the prompt the index finds there."""
    status, member = replica.status, replica.member
    cached_tokens = cached_blocks * member.block_size
    tokens_per_s = status.prefill_tokens_per_s or usual.prefill_tokens_per_s
    # What we have sent and it has not reported yet counts too.
    queued_tokens = max(status.queued_tokens, replica.pending_tokens)
    return ReplicaView(
        replica=replica.id,
        cached_tokens=cached_tokens,
        stored_tokens=cached_tokens,
        queue_s=queued_tokens / tokens_per_s,
        num_streams=max(status.running + status.waiting, replica.num_requests),
        num_blocks=member.num_blocks,
        available_blocks=status.blocks_free + status.blocks_cached,
        timing=_timing(replica, StepTiming(base_s=usual.step_s, token_s=1 / tokens_per_s)),
        max_batch_tokens=member.max_batch_tokens,
        link_bytes_per_s=status.link_bytes_per_s or usual.link_bytes_per_s,
    )


def _timing(replica: Replica, usual: StepTiming) -> StepTiming:
    status = replica.status
    return timing_from_proto(status.timing) if status.HasField("timing") else usual


def _mean(values: Sequence[float], default: float) -> float:
    """Of what was measured."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
