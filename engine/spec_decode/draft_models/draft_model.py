"""A smaller model of the same tokenizer drafts what the served one goes on with (Leviathan et al. 2023,
arXiv:2211.17192; but that a draft is right where it equals the token that is drawn anyway: see engine.spec_decode)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from core.model import config as model_config
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import GIB, EngineConfig
from engine.runner.decode_graphs import graph_sizes
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_tables import DraftTable, DraftTables
from engine.spec_decode.draft_models.sampled_drafts import Drawn, DrawnDraft, DrawnTokens
from engine.spec_decode.proposer import NOTHING, Proposal
from engine.weights.open_checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

_KV_GIB = {"cpu": 0.25, "cuda": 1.0}  # mapped as it is used; taken at once
_UNEVEN = 1.05  # what torch's allocator loses between tensors
_STEP_BYTES = 256 << 20  # activations of what is computed at once: see Asking
_LOGIT_BYTES = 64  # as MemoryTrial counts for those of the served model
_GRAPH_BYTES = 6 << 20  # of a recorded step of a small model: a guess, for no GPU has seen one


class DraftModel:
    """Implements Computing, on rank 0 of a replica alone, whatever its tensor parallelism: a model, a pool and tables
    of its own. Nothing of them is shipped: where a sequence goes on elsewhere, its tokens are computed there anew, as
    prompts are that come with their KV from a prefill replica. What it computes are rows of steps of its own, all
    sequences together: first what each lacks, then a token for each, as often as is asked."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int) -> None:
        """vocab_size: of the served model. Of sequences with a token that the draft model has not, it says nothing."""
        self.tables = DraftTables(runner.pool.num_blocks, block_size=runner.layout.block_size)
        self._runner = runner
        self._block_size = runner.layout.block_size
        self._max_tokens = runner.max_tokens  # of a sequence
        self._vocab_size = runner.config.vocab_size
        self._has_all = self._vocab_size >= vocab_size
        self._drawn = DrawnTokens()

    @classmethod
    def open(cls, config: EngineConfig, *, vocab_size: int, num_tokens: int) -> DraftModel:
        """config: its own, without a number of blocks. num_tokens: for how many the served model has room. Takes as
        long as a model takes to load. Raises SpecError."""
        layout = config.layout()
        num_blocks = max(1, min(_kv_bytes(config) // layout.block_bytes, -(-num_tokens // layout.block_size)))
        runner = ModelRunner(replace(config, num_blocks=num_blocks))
        runner.warm_up(config.max_batch_tokens)
        logger.info("drafts by %s, with room for %d tokens", config.model_dir, num_blocks * layout.block_size)
        return cls(runner, vocab_size=vocab_size)

    def num_behind(self, sequence: Sequence) -> int | None:
        if len(sequence.tokens) >= self._max_tokens:
            return None
        num_missing = self.tables.num_missing(sequence)
        if not self._has_all and max(sequence.tokens[-num_missing:]) >= self._vocab_size:
            return None
        return num_missing

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        table = self.tables.open(sequence, len(sequence.tokens), keep=(sequence,))
        if table is None:
            return
        start = table.num_known
        count = min(num_tokens, len(sequence.tokens) - 1 - start)
        if count > 0:
            self._compute([Row(sequence.tokens[start : start + count], start, table.blocks, num_logits=0)])
            self.tables.computed(sequence, table, count)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafting = [_Drafting(one, table) for one in sequences if (table := self._open(one, max_tokens, sequences))]
        drafting.sort(key=lambda one: one.num_missing)  # rows of few tokens come first
        going_on = drafting
        for place in range(max_tokens):
            if not going_on:
                break
            logits = self._compute([one.row() for one in going_on])
            for one in going_on:
                one.note_computed(self.tables)
            drawn = self._drawn.draw(logits, [one.sequence for one in going_on], place)
            for one, token in zip(going_on, drawn, strict=True):
                one.take(token, max_tokens=self._max_tokens)
            going_on = [one for one in going_on if not one.is_over]
        found = {one.sequence: one.draft.proposal() for one in drafting}
        return [found.get(sequence, NOTHING) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        pass

    def rest(self, num_first: int | None) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self.tables.forget(sequence)

    def _open(self, sequence: Sequence, max_tokens: int, keep: Seq[Sequence]) -> DraftTable | None:
        num_tokens = min(len(sequence.tokens) + max_tokens - 1, self._max_tokens)
        return self.tables.open(sequence, num_tokens, keep=keep)

    def _compute(self, rows: Seq[Row]) -> Tensor:
        return self._runner.forward(Batch.of(rows, block_size=self._block_size))


class _Drafting:
    """A row of an ask."""

    def __init__(self, sequence: Sequence, table: DraftTable) -> None:
        self.sequence = sequence
        self.draft = DrawnDraft()
        self.is_over = False
        self._table = table

    @property
    def num_missing(self) -> int:
        return len(self.sequence.tokens) - self._table.num_known

    def row(self) -> Row:
        """What is computed next: all that is missing, or the token that was drafted last."""
        table = self._table
        if drafted := self.draft.tokens:
            return Row(drafted[-1:], len(self.sequence.tokens) + len(drafted) - 1, table.blocks, num_logits=1)
        return Row(self.sequence.tokens[table.num_known :], table.num_known, table.blocks, num_logits=1)

    def note_computed(self, tables: DraftTables) -> None:
        if self.draft.tokens:
            self._table.drafted.append(self.draft.tokens[-1])
        else:
            tables.computed(self.sequence, self._table, self.num_missing)

    def take(self, token: Drawn | None, *, max_tokens: int) -> None:
        """None: there is none, and nothing can follow it."""
        self.draft.take(token)
        self.is_over = self.draft.is_over or len(self.sequence.tokens) + len(self.draft.tokens) > max_tokens


def bytes_of(config: EngineConfig) -> int:
    """What one takes of a GPU, with this config of its own: weights, widened if they must be, KV, and its steps."""
    shapes, itemsize = open_checkpoint(config.model_dir).shapes, getattr(torch, config.dtype).itemsize
    weights = sum(math.prod(shape) for shape in shapes.values()) * itemsize
    logits = config.max_running * model_config.load(config.model_dir).vocab_size * _LOGIT_BYTES
    graphs = len(graph_sizes(config.recorded_rows)) * _GRAPH_BYTES if config.recorded_rows else 0
    return int(weights * _UNEVEN) + _kv_bytes(config) + logits + _STEP_BYTES + graphs


def _kv_bytes(config: EngineConfig) -> int:
    return int(_KV_GIB["cuda" if config.device.startswith("cuda") else "cpu"] * GIB)
