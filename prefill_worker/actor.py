"""A rank of a prefill replica: what this role brings to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpc import aio

from cluster.rpc import worker_pb2_grpc
from cluster.words.request import Role
from cluster.words.spec import Spec
from cluster.worker.rank_process import RankProcess
from cluster.worker.role_parts import LeaderParts, LiveReplica
from engine.config import EngineConfig
from prefill_worker.server import PrefillServicer
from prefill_worker.worker import PrefillWorker


def make_rank(spec: dict[str, Any], **arguments: Any) -> RankProcess[PrefillWorker]:
    """What the controller starts: one rank of a prefill replica."""
    return RankProcess(spec, role=PrefillParts(), **arguments)


class PrefillParts:
    """Implements cluster.worker.role_parts.RoleParts."""

    role = Role.PREFILL

    def __init__(self) -> None:
        self._servicer = PrefillServicer()

    def configure(self, config: EngineConfig, spec: Spec) -> EngineConfig:
        return config

    def register(self, server: aio.Server) -> None:
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self._servicer, server)

    def make_worker(self, parts: LeaderParts) -> PrefillWorker:
        return PrefillWorker(replace(parts.engine, limits=replace(parts.engine.limits, decodes=False)))

    def serve(self, live: LiveReplica[PrefillWorker]) -> None:
        self._servicer.live = live
