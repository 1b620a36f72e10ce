"""A rank of a decode replica: what this role brings to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpc import aio

from cluster.rpc import worker_pb2_grpc
from cluster.words.request import Role
from cluster.words.spec import Spec
from cluster.worker.rank_process import RankProcess
from cluster.worker.role_parts import LeaderParts, LiveReplica
from decode_worker.server import DecodeServicer
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig


def make_rank(spec: dict[str, Any], **arguments: Any) -> RankProcess[DecodeWorker]:
    """What the controller starts: one rank of a decode replica."""
    return RankProcess(spec, role=DecodeParts(), **arguments)


class DecodeParts:
    """Implements cluster.worker.role_parts.RoleParts."""

    role = Role.DECODE

    def __init__(self) -> None:
        self._servicer = DecodeServicer()

    def configure(self, config: EngineConfig, spec: Spec) -> EngineConfig:
        pool = spec.decode
        return replace(
            config,
            expert_parallel=pool.expert_parallel,
            redundant_experts=pool.redundant_experts,
            recorded_rows=pool.max_running if spec.engine.cuda_graphs == "auto" else 0,
        )

    def register(self, server: aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._servicer, server)

    def make_worker(self, parts: LeaderParts) -> DecodeWorker:
        setup = parts.setup
        return DecodeWorker(
            parts.engine,
            parts.receiver,
            name=setup.replica,
            addresses=setup.addresses,
            handoff_s=setup.spec.timeouts.handoff_s,
            close_handoff=parts.inbox.close_handoff,
        )

    def serve(self, live: LiveReplica[DecodeWorker]) -> None:
        self._servicer.live = live
