"""Interface between a rank and its role. See prefill_worker.actor and decode_worker.actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from core.rpc import worker_pb2 as pb
from core.spec.schema import Spec
from core.types.handoff import Handoff
from core.types.request import Role
from core.wire.messages import handoff_from_proto, sequence_from_proto
from engine.config import EngineConfig
from engine.kv.layout import KVLayout
from engine.scheduler.sequence import Sequence
from kvtransfer.protocol.validation import check_handoff
from kvtransfer.transfer.receiver import Receiver
from worker.grammars import Grammars
from worker.rank_group import OtherRanks
from worker.rank_setup import RankSetup
from worker.replica_service import ReplicaService
from worker.request_validation import check_request
from worker.step_inbox import Inbox
from worker.worker import EngineParts, Worker


@dataclass(frozen=True, kw_only=True)
class LeaderParts:
    """Components from which rank 0 creates a role's worker."""

    setup: RankSetup
    receiver: Receiver
    inbox: Inbox
    engine: EngineParts


@dataclass(frozen=True, kw_only=True)
class LiveReplica:
    """A loaded replica. Used by its servicers on the event loop."""

    service: ReplicaService
    worker: Worker
    others: OtherRanks
    layout: KVLayout
    max_tokens: int  # per sequence
    vocab_size: int
    grammars: Grammars

    async def sequence_of(self, message: pb.Sequence) -> Sequence:
        """Parse and validate a sequence, and compile its grammar. Raises RequestError."""
        request = sequence_from_proto(message)
        check_request(request, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        first, layout = request.choices[0], self.layout  # after a migration, any of the client's choices
        sequence = Sequence(
            request, first, model=layout.model, block_size=layout.block_size, max_context=self.max_tokens
        )
        sequence.sampling_row.mask = await self.grammars.mask_of(request)
        return sequence

    def handoff_of(self, message: pb.Handoff) -> Handoff:
        """Parse and validate a handoff that this replica will fill. Raises RequestError."""
        handoff = handoff_from_proto(message)
        check_handoff(handoff, self.layout)
        return handoff


@dataclass(frozen=True, kw_only=True)
class RoleParts:
    """Components that a role provides to its ranks."""

    role: Role
    servicer: Any  # of AnswerServicer
    add_servicer: Callable[[Any, aio.Server], None]
    make_worker: Callable[[LeaderParts], Worker]
    configure: Callable[[EngineConfig, Spec], EngineConfig] = lambda config, spec: (
        config
    )  # adapts the engine to the role
