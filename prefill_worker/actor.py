"""Prefill role of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.spec.schema import Spec
from core.types.launch import Launch
from core.types.request import Role
from core.types.role_switch import hindrance
from engine.config import EngineConfig
from prefill_worker.server import PrefillServicer
from prefill_worker.worker import PrefillWorker
from worker.rank_process import RankProcess
from worker.role_parts import LeaderParts, RoleParts


def make_rank(launch: Launch, **arguments: Any) -> RankProcess:
    """Create one rank of a prefill replica. Called by the controller."""
    parts = RoleParts(
        role=Role.PREFILL,
        servicer=PrefillServicer(),
        make_worker=_make_worker,
        configure=_configure,
    )
    return RankProcess(launch, role=parts, **arguments)


def _configure(config: EngineConfig, spec: Spec) -> EngineConfig:
    """Set the number of rows to record CUDA graphs for.

    Covers local decodes, and the decode role if the replica may switch to it later.
    """
    rows = int(spec.prefill.local_decode_share * spec.prefill.max_running)
    if not hindrance(spec):
        rows = max(rows, spec.decode.max_running)
    return replace(config, recorded_rows=rows if spec.engine.cuda_graphs == "auto" else 0)


def _make_worker(parts: LeaderParts) -> PrefillWorker:
    return PrefillWorker(replace(parts.engine, limits=replace(parts.engine.limits, decodes=False)))
