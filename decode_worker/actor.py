"""Decode role of a rank, and its draft proposers: draft heads, a draft model, or the model without some layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.model import source as model_source
from core.model.draft_source import check_same_tokens, draft_source
from core.spec.schema import Spec
from core.types.launch import Launch
from core.types.request import Role
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.spec_decode.draft_models.draft_model import DraftModel, HeadProposer, OwnLayers, bytes_of
from engine.spec_decode.heads.head_row import Choose, HeadRow
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.speculation import Speculation
from engine.spec_decode.suffix import Corpus
from worker.answer_server import AnswerServicer
from worker.rank_process import RankProcess
from worker.role_parts import LeaderParts, RoleParts
from worker.worker import EngineParts


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
    models = _open_models(parts.setup.spec, parts.engine)
    return Speculation.of(spec.method, max_tokens=spec.max_tokens, vocab_size=vocab_size, models=models, corpus=corpus)


def _configure(config: EngineConfig, spec: Spec) -> EngineConfig:
    pool = spec.decode
    return replace(
        config,
        expert_parallel=pool.expert_parallel,
        redundant_experts=pool.redundant_experts,
        recorded_rows=pool.max_running if spec.engine.cuda_graphs == "auto" else 0,
        draft_bytes=_draft_bytes(config, spec),
    )


def _open_models(spec: Spec, parts: EngineParts) -> dict[str, ModelProposer]:
    """Return the model proposers of rank 0 by method. Loads a draft model. Raises SpecError."""
    runner = parts.gang.runner
    if spec.speculation.method == "self":
        return {"self": OwnLayers(runner, parts.blocks, before_writing=parts.flush_copies)}
    drafts = draft_source(spec)
    if drafts is None:
        return {}
    if drafts.heads:
        return {drafts.heads: HeadProposer(_GangHeads(parts))}
    check_same_tokens(drafts.directory, model_source.resolve(spec.model.source))
    config = _own_config(spec, drafts.directory, device=str(runner.device))
    num_tokens = runner.pool.num_blocks * runner.layout.block_size
    return {"draft": DraftModel.open(config, vocab_size=runner.config.vocab_size, num_tokens=num_tokens)}


class _GangHeads:
    """RankHeads of all ranks. The heads write to a row's last block, which may be newly allocated."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def num_behind(self, row: HeadRow) -> int | None:
        return self._parts.gang.runner.num_behind(row)

    def catch_up(self, rows: Seq[HeadRow], max_tokens: int | None = None) -> None:
        self._parts.gang.runner.catch_up(rows, max_tokens)

    def rest(self, num_first: int | None) -> None:
        self._parts.gang.runner.rest(num_first)

    def draft(self, rows: Seq[HeadRow], max_tokens: int, choose: Choose) -> None:
        self.catch_up(rows)  # before flush_copies settles the deferred draft KV
        self._parts.flush_copies()
        self._parts.gang.draft(rows, max_tokens, choose)


def _draft_bytes(config: EngineConfig, spec: Spec) -> int:
    """Return the GPU memory to reserve on each rank for a draft model. config: of the served model.

    The result is equal on all ranks, because their pools have the same size.
    """
    drafts = draft_source(spec) if config.device.startswith("cuda") else None
    return bytes_of(_own_config(spec, drafts.directory, device=config.device)) if drafts and not drafts.heads else 0


def _own_config(spec: Spec, directory: Path, *, device: str) -> EngineConfig:
    return EngineConfig(
        model_dir=directory,
        device=device,
        dtype=spec.model.dtype,
        weights=spec.model.weights,
        block_size=spec.kv.block_size,
        max_batch_tokens=spec.decode.max_batch_tokens,
        max_running=spec.decode.max_running,
        recorded_rows=spec.decode.max_running if spec.engine.cuda_graphs == "auto" else 0,
    )
