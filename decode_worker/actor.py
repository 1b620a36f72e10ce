"""Decode role of a rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.spec.schema import Spec
from core.types.launch import Launch
from core.types.request import Role
from decode_worker.drafts import draft_bytes, open_models
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from worker.answer_server import AnswerServicer
from worker.rank_process import RankProcess
from worker.role_parts import LeaderParts, RoleParts


def make_rank(launch: Launch, **arguments: Any) -> RankProcess:
    """Create one rank of a decode replica. Called by the controller."""
    parts = RoleParts(
        role=Role.DECODE,
        servicer=AnswerServicer(),
        make_worker=_make_worker,
        configure=_configure,
    )
    return RankProcess(launch, role=parts, **arguments)


def _make_worker(parts: LeaderParts) -> DecodeWorker:
    corpus = Corpus()
    speculation = _speculation(parts, corpus)
    return DecodeWorker(
        parts.engine,
        parts.receiver,
        name=parts.setup.replica,
        addresses=parts.setup.addresses,
        handoff_s=parts.setup.spec.timeouts.handoff_s,
        close_handoff=parts.service.close_handoff,
        speculation=speculation,
        corpus=corpus if speculation and "suffix" in speculation.counts else None,
    )


def _speculation(parts: LeaderParts, corpus: Corpus) -> Speculation | None:
    spec, vocab_size = parts.setup.spec.speculation, parts.engine.gang.runner.config.vocab_size
    if spec.method == "off":
        return None
    models = open_models(parts.setup.spec, parts.engine)
    return Speculation.of(spec.method, max_tokens=spec.max_tokens, vocab_size=vocab_size, models=models, corpus=corpus)


def _configure(config: EngineConfig, spec: Spec) -> EngineConfig:
    pool = spec.decode
    return replace(
        config,
        expert_parallel=pool.expert_parallel,
        redundant_experts=pool.redundant_experts,
        recorded_rows=pool.max_running if spec.engine.cuda_graphs == "auto" else 0,
        draft_bytes=draft_bytes(config, spec),
    )
