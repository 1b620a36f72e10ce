"""A rank of a prefill replica: what this role brings to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.spec.schema import Spec
from core.types.launch import Launch
from core.types.request import Role
from core.types.role_switch import hindrance
from engine.config import EngineConfig
from prefill_worker.server import PrefillServicer, add_prefill_servicers
from prefill_worker.worker import PrefillWorker
from worker.rank_process import RankProcess
from worker.role_parts import LeaderParts, RoleParts


def make_rank(launch: Launch, **arguments: Any) -> RankProcess[PrefillWorker]:
    """What the controller starts: one rank of a prefill replica."""
    parts = RoleParts(
        role=Role.PREFILL,
        servicer=PrefillServicer(),
        add_servicer=add_prefill_servicers,
        make_worker=_make_worker,
        configure=_configure,
    )
    return RankProcess(launch, role=parts, **arguments)


def _configure(config: EngineConfig, spec: Spec) -> EngineConfig:
    """Its guests decode; and it may become a decode replica, which should not have to record its steps first."""
    rows = int(spec.prefill.local_decode_share * spec.prefill.max_running)
    if not hindrance(spec):
        rows = max(rows, spec.decode.max_running)
    return replace(config, recorded_rows=rows if spec.engine.cuda_graphs == "auto" else 0)


def _make_worker(parts: LeaderParts) -> PrefillWorker:
    return PrefillWorker(replace(parts.engine, limits=replace(parts.engine.limits, decodes=False)))
