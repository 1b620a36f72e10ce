"""What a role brings to its ranks, and what it is given there. See prefill_worker.actor and decode_worker.actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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
from worker.replica_engine import EngineParts
from worker.replica_service import ReplicaService, RoleWorker
from worker.request_validation import check_request
from worker.step_inbox import Inbox

W = TypeVar("W", bound=RoleWorker)


@dataclass(frozen=True, kw_only=True)
class LeaderParts:
    """What a role's worker is made from, on rank 0."""

    setup: RankSetup
    receiver: Receiver
    inbox: Inbox
    engine: EngineParts


@dataclass(frozen=True, kw_only=True)
class LiveReplica(Generic[W]):
    """A replica that takes requests, as its servicers see it on the event loop."""

    service: ReplicaService
    worker: W
    others: OtherRanks
    layout: KVLayout
    max_tokens: int  # of a sequence
    vocab_size: int
    grammars: Grammars

    async def sequence_of(self, message: pb.Sequence) -> Sequence:
        """Waits where it has a grammar. Raises RequestError for one that a step cannot compute."""
        request = sequence_from_proto(message)
        check_request(request, vocab_size=self.vocab_size, max_tokens=self.max_tokens)
        first, layout = request.choices[0], self.layout  # after a migration, any of the client's choices
        sequence = Sequence(
            request, first, model=layout.model, block_size=layout.block_size, max_context=self.max_tokens
        )
        sequence.sampling_row.mask = await self.grammars.mask_of(request)
        return sequence

    def handoff_of(self, message: pb.Handoff) -> Handoff:
        """One to be filled from here. Raises RequestError."""
        handoff = handoff_from_proto(message)
        check_handoff(handoff, self.layout)
        return handoff


class RoleServicer(Protocol[W]):
    """The gRPC face of a role."""

    live: LiveReplica[W] | None  # from when it is there, the servicer takes requests


@dataclass(frozen=True, kw_only=True)
class RoleParts(Generic[W]):
    """What a role brings: see prefill_worker.actor and decode_worker.actor."""

    role: Role
    servicer: RoleServicer[W]
    add_servicer: Callable[[Any, aio.Server], None]
    make_worker: Callable[[LeaderParts], W]
    configure: Callable[[EngineConfig, Spec], EngineConfig] = lambda config, spec: config  # of the role's engine
