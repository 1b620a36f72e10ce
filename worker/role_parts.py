"""Interface between a rank and its role. See prefill_worker.actor and decode_worker.actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.spec.schema import Spec
from core.types.request import Role
from engine.config import EngineConfig
from kvtransfer.transfer.receiver import Receiver
from worker.answer_server import AnswerServicer
from worker.rank_setup import RankSetup
from worker.replica_service import ReplicaService
from worker.worker import EngineParts, Worker


@dataclass(frozen=True, kw_only=True)
class LeaderParts:
    """Components from which rank 0 creates a role's worker."""

    setup: RankSetup
    receiver: Receiver
    service: ReplicaService
    engine: EngineParts


@dataclass(frozen=True, kw_only=True)
class RoleParts:
    """Components that a role provides to its ranks."""

    role: Role
    servicer: AnswerServicer
    make_worker: Callable[[LeaderParts], Worker]
    configure: Callable[[EngineConfig, Spec], EngineConfig]  # adapts the engine to the role
