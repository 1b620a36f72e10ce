"""Model proposers of a decode replica: draft heads, a draft model, or the model itself without some layers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from core.model import source as model_source
from core.model.draft_source import check_same_tokens, draft_source
from core.spec.schema import Spec
from engine.config import EngineConfig
from engine.spec_decode.draft_models.draft_model import DraftModel, HeadProposer, OwnLayers, bytes_of
from engine.spec_decode.heads.head_row import Choose, HeadRow
from engine.spec_decode.proposer import ModelProposer
from worker.worker import EngineParts


def open_models(spec: Spec, parts: EngineParts) -> dict[str, ModelProposer]:
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
    """RankHeads of all ranks. They write to a row's last block, which may be newly allocated."""

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


def draft_bytes(config: EngineConfig, spec: Spec) -> int:
    """Return the GPU memory to reserve on each rank for a draft model. config: of the served model.

    Equal on all ranks, because their pools have the same size.
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
