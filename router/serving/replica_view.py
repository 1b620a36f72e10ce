"""What a choice is told of a replica: its own account of itself, and what we have asked of it since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.index.prefix_index import Depths
from cluster.rpc import worker_pb2 as pb
from cluster.wire.messages import timing_from_proto
from cluster.words.timing import StepTiming
from router.routing.policy import CandidateReplica
from router.routing.room import DecodeLoad, decode_has_room
from router.serving.replicas import Replica

_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_STEP_S = 0.02
_DEFAULT_LINK_BYTES_PER_S = 1e9
_DEFAULT_HOST_BYTES_PER_S = 4e9  # from a replica's memory to its device
_DEFAULT_DISK_BYTES_PER_S = 5e8


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


def view_of(replica: Replica, held: Depths, usual: Usual) -> CandidateReplica:
    """`held`: how many leading blocks of the prompt the index finds there."""
    status, member = replica.status, replica.member
    tokens_per_s = status.prefill_tokens_per_s or usual.prefill_tokens_per_s
    # What we have sent and it has not reported yet counts too.
    queued_tokens = max(status.queued_tokens, replica.pending_tokens)
    return CandidateReplica(
        replica=replica.id,
        cached_tokens=held.device * member.block_size,
        stored_tokens=held.disk * member.block_size,
        queue_s=queued_tokens / tokens_per_s,
        num_streams=num_streams(replica),
        num_blocks=member.num_blocks,
        available_blocks=status.blocks_free + status.blocks_cached,
        timing=_timing(replica, StepTiming(base_s=usual.step_s, token_s=1 / tokens_per_s)),
        max_batch_tokens=member.max_batch_tokens,
        link_bytes_per_s=status.link_bytes_per_s or usual.link_bytes_per_s,
        restore_bytes_per_s=_restore_bytes_per_s(held, status),
    )


def num_streams(replica: Replica) -> int:
    """On a decode replica: what it has told, or what we have sent if that is more."""
    return max(replica.status.running + replica.status.waiting, replica.num_requests)


def has_room(replica: Replica, *, num_blocks: int, num_streams: int) -> bool:
    """Whether a decode replica would take up so much more at once."""
    status, member = replica.status, replica.member
    load = DecodeLoad(
        num_blocks=member.num_blocks,
        held_blocks=member.num_blocks - status.blocks_free - status.blocks_cached,
        promised_blocks=replica.promised_blocks,
        num_streams=max(status.running + status.waiting, replica.promised_streams),
        max_streams=member.max_running,
        num_waiting=status.waiting,
    )
    return decode_has_room(load, num_blocks=num_blocks, num_streams=num_streams)


def _restore_bytes_per_s(held: Depths, status: pb.Status) -> float:
    """At which rate this prefix comes back from where it lies below the device; 0: nothing of it does."""
    from_host, from_disk = held.host - held.device, held.disk - held.host
    if not (from_host or from_disk):
        return 0.0
    block_s = from_host / (status.host_bytes_per_s or _DEFAULT_HOST_BYTES_PER_S)
    block_s += from_disk / (status.disk_bytes_per_s or _DEFAULT_DISK_BYTES_PER_S)
    return (from_host + from_disk) / block_s


def _timing(replica: Replica, usual: StepTiming) -> StepTiming:
    status = replica.status
    return timing_from_proto(status.timing) if status.HasField("timing") else usual


def _mean(values: Sequence[float], default: float) -> float:
    """Of what was measured."""
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else default
