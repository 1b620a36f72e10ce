"""Model proposers: a smaller model, the served model without some of its layers, or heads on its hidden states."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from core.model import config as model_config
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import GIB, EngineConfig
from engine.kv.block_manager import BlockManager
from engine.runner.decode_graphs import graph_sizes
from engine.runner.runner import ModelRunner
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft_models.draft_sampler import DraftSampler, DraftToken, RowDraft
from engine.spec_decode.draft_models.draft_tables import DraftTable, DraftTables
from engine.spec_decode.heads.head_row import HeadLogits, HeadRow
from engine.spec_decode.heads.heads import RankHeads
from engine.spec_decode.proposer import NO_PROPOSAL, ModelProposer, Proposal
from engine.weights.open_checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

_KV_GIB = {"cpu": 0.25, "cuda": 1.0}  # mapped when used on a CPU; allocated at once on a GPU
_FRAGMENTATION = 1.05  # loss of torch's allocator between tensors
_STEP_BYTES = 256 << 20  # activations of one call; see DraftScheduler, which bounds its tokens
_LOGIT_BYTES = 64  # per logit, as MemoryTrial counts for the served model
_GRAPH_BYTES = 6 << 20  # of a recorded step of a small model; an estimate, not measured on a GPU


class DraftModel(ModelProposer):
    """Proposer by a smaller model of the same tokenizer (Leviathan et al. 2023, arXiv:2211.17192).

    Runs on rank 0 only, whatever the tensor parallelism, with its own weights, pool and block tables. None of its KV is
    shipped: after a sequence moves, the new replica's draft model computes it again. A call computes the missing KV of
    each sequence, then drafts one token per sequence at a time.
    """

    def __init__(self, runner: ModelRunner, *, vocab_size: int) -> None:
        """vocab_size: the served model's. Proposes nothing for sequences with a token outside its own vocabulary."""
        self.tables = DraftTables(runner.pool.num_blocks, block_size=runner.layout.block_size)
        self._runner = runner
        self._block_size = runner.layout.block_size
        self._max_tokens = runner.max_tokens  # of a sequence
        self._vocab_size = runner.config.vocab_size
        self._has_all = self._vocab_size >= vocab_size
        self._sampler = DraftSampler()

    @classmethod
    def open(cls, config: EngineConfig, *, vocab_size: int, num_tokens: int) -> DraftModel:
        """Load the model. config: its num_blocks is ignored. num_tokens: KV capacity of the served model.

        Raises SpecError.
        """
        model_config.load(config.model_dir).check_drafts("speculation.model")
        layout = config.layout()
        num_blocks = max(1, min(_kv_bytes(config) // layout.block_bytes, -(-num_tokens // layout.block_size)))
        runner = ModelRunner(replace(config, num_blocks=num_blocks))
        runner.warm_up(config.max_batch_tokens)
        logger.info("draft model loaded model=%s kv_tokens=%d", config.model_dir, num_blocks * layout.block_size)
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
            self._forward(
                Batch.of(
                    [Row(sequence.tokens[start : start + count], start, table.blocks, num_logits=0)],
                    block_size=self._block_size,
                )
            )
            self.tables.computed(sequence, table, count)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        tables: dict[Sequence, DraftTable] = {}
        for sequence in sequences:
            num_tokens = min(len(sequence.tokens) + max_tokens - 1, self._max_tokens)
            if table := self.tables.open(sequence, num_tokens, keep=sequences):
                tables[sequence] = table
        rows = [_Row(one, table.num_known, table.blocks, self._max_tokens) for one, table in tables.items()]
        rows.sort(key=lambda row: len(row.sequence.tokens) - row.start)  # a batch has its rows of few tokens first
        proposals = _draft(rows, sequences, max_tokens, self._forward, self._sampler, block_size=self._block_size)
        for row in rows:
            table = tables[row.sequence]
            self.tables.computed(row.sequence, table, len(row.sequence.tokens) - row.start)
            table.drafted += row.draft.tokens[: row.num_steps - 1]
        return proposals

    def forget(self, sequence: Sequence) -> None:
        self.tables.forget(sequence)

    def _forward(self, batch: Batch) -> Tensor:
        return self._runner.forward(batch)


class OwnLayers(ModelProposer):
    """Proposer that runs the served model without its middle third of layers, for a replica of one rank.

    It has no state (Zhang et al. 2023, arXiv:2309.08168): a draft reads the KV of the kept layers from the replica's
    pool, and writes behind it, from the sequence's last token on. The step that verifies the draft overwrites that KV
    for all layers. Blocks beyond the sequence's own are freed at once.
    """

    def __init__(self, runner: ModelRunner, blocks: BlockManager, *, before_writing: Callable[[], None]) -> None:
        """blocks: the pool's manager. before_writing: saves the content of free blocks before drafts overwrite them.

        Raises SpecError for models with states.
        """
        runner.config.check_drafts("speculation.method")
        num_layers = runner.config.num_layers
        first = (num_layers - num_layers // 3) // 2
        self._forward = runner.without(range(first, first + num_layers // 3))
        self._blocks = blocks
        self._block_size = runner.layout.block_size
        self._max_tokens = runner.max_tokens
        self._before_writing = before_writing
        self._sampler = DraftSampler()

    def num_behind(self, sequence: Sequence) -> int | None:
        """Return 1 if only the last token's KV is missing, else None."""
        return 1 if sequence.num_missing == 1 and len(sequence.tokens) < self._max_tokens else None

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        rows = [
            _Row(one, len(one.tokens) - 1, [*one.blocks, *beyond], self._max_tokens)
            for one in sequences
            if (beyond := self._beyond(one, max_tokens)) is not None
        ]
        lent = self.attach_parts(rows, max_tokens) if self._blocks.windows else []
        self._before_writing()
        proposals = _draft(rows, sequences, max_tokens, self._forward, self._sampler, block_size=self._block_size)
        if self._blocks.windows:
            self._blocks.windows.drop(lent)
        for row in rows:
            self._free(row)
        return proposals

    def _beyond(self, sequence: Sequence, max_tokens: int) -> list[int] | None:
        """Allocate and return blocks for a draft after the sequence's own. None: no room, or beyond the KV capacity."""
        num_tokens = len(sequence.tokens) + max_tokens - 1
        if num_tokens > self._max_tokens:
            return None
        beyond: list[int] = []
        missing = sequence.num_blocks_for(num_tokens) - len(sequence.blocks)
        return beyond if self._blocks.extend(beyond, max(0, missing)) else None

    def attach_parts(self, rows: list[_Row], max_tokens: int) -> list[int]:
        """Attach window parts for the positions to draft. Returns the blocks whose parts the caller drops afterwards.

        Removes the rows that get no parts: reservations end with the block of the last token.
        """
        windows, lent = self._blocks.windows, list[int]()
        assert windows
        for row in rows:
            sequence, size = row.sequence, len(row.sequence.tokens)
            sequence.parts.advance(windows.first_seen(size - 1), windows)
            sequence.parts.extend(sequence.blocks, sequence.num_blocks_for(size), windows)
        for row in rows.copy():
            sequence, size = row.sequence, len(row.sequence.tokens)
            behind = row.blocks[sequence.parts.end : sequence.num_blocks_for(size + max_tokens - 1)]
            if len(behind) <= windows.num_available:
                windows.attach(behind)
                lent += behind
            else:
                rows.remove(row)
                self._free(row)
        return lent

    def _free(self, row: _Row) -> None:
        """Free the blocks behind the sequence's own."""
        self._blocks.free(row.blocks[len(row.sequence.blocks) :])


class _Row:
    """Row of a call to the model, which drafts one token at a time."""

    def __init__(self, sequence: Sequence, start: int, blocks: list[int], max_tokens: int) -> None:
        """start: index of the first token to compute. max_tokens: maximum length of a sequence."""
        self.sequence = sequence
        self.start = start
        self.blocks = blocks
        self.draft = RowDraft()
        self.num_steps = 0
        self._most_drafted = max_tokens - len(sequence.tokens)

    def row(self) -> Row:
        """Return the tokens to compute next."""
        if drafted := self.draft.tokens:
            return Row(drafted[-1:], len(self.sequence.tokens) + len(drafted) - 1, self.blocks, num_logits=1)
        return Row(self.sequence.tokens[self.start :], self.start, self.blocks, num_logits=1)

    def take(self, token: DraftToken | None) -> None:
        """Append the token that was sampled behind the row; None ends the draft."""
        self.num_steps += 1
        self.draft.take(token)
        self.draft.is_over |= len(self.draft.tokens) > self._most_drafted


def _draft(
    rows: Seq[_Row],
    sequences: Seq[Sequence],
    max_tokens: int,
    forward: Callable[[Batch], Tensor],
    sampler: DraftSampler,
    *,
    block_size: int,
) -> list[Proposal]:
    """Draft up to max_tokens tokens of each row, all rows together. Returns a proposal for each sequence."""
    assert max_tokens > 0, "without a step nothing of the rows is computed"
    drafting = rows
    for place in range(max_tokens):
        if not drafting:
            break
        logits_RV = forward(Batch.of([row.row() for row in drafting], block_size=block_size))
        tokens = sampler.draw(logits_RV, [row.sequence for row in drafting], place)
        for row, token in zip(drafting, tokens, strict=True):
            row.take(token)
        drafting = [row for row in drafting if not row.draft.is_over]
    found = {row.sequence: row.draft.proposal() for row in rows}
    return [found.get(sequence, NO_PROPOSAL) for sequence in sequences]


class HeadProposer(ModelProposer):
    """Proposer by draft heads.

    Steps and KV transfers record the state that heads need, so only resting heads have to catch up.
    """

    def __init__(self, heads: RankHeads, sampler: DraftSampler | None = None) -> None:
        """sampler: None to create one."""
        self._heads = heads
        self._sampler = sampler or DraftSampler()

    def num_behind(self, sequence: Sequence) -> int | None:
        return self._heads.num_behind(_head_row(sequence)) if _decodes(sequence) else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        self._heads.catch_up([_head_row(sequence)], num_tokens)

    def rest(self, num_first: int | None) -> None:
        self._heads.rest(num_first)

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafts = [(sequence, RowDraft()) for sequence in sequences]
        called = [(sequence, draft) for sequence, draft in drafts if _decodes(sequence)]
        if called:
            self._heads.draft(
                [_head_row(sequence) for sequence, _ in called], max_tokens, partial(self._choose, called)
            )
        return [draft.proposal() for _, draft in drafts]

    def _choose(
        self, called: Seq[tuple[Sequence, RowDraft]], logits: HeadLogits, rows: Seq[int], place: int
    ) -> list[int]:
        drafting = [called[row] for row in rows]
        sequences = [sequence for sequence, _ in drafting]
        tokens = self._sampler.draw(logits.values_RD, sequences, place, ids_V=logits.ids_D)
        return [draft.take(token) for (_, draft), token in zip(drafting, tokens, strict=True)]


def _decodes(sequence: Sequence) -> bool:
    """Return whether only the last token's KV is missing, and none is in flight."""
    is_next_to_last = sequence.num_computed == len(sequence.tokens) - 1 > 0
    return is_next_to_last and bool(sequence.blocks) and not sequence.num_in_flight


def _head_row(sequence: Sequence) -> HeadRow:
    return HeadRow(sequence.tokens[-1], len(sequence.tokens) - 1, sequence.blocks)


def bytes_of(config: EngineConfig) -> int:
    """Return the GPU memory of a draft model with this config: weights, KV, activations and recorded steps."""
    shapes, itemsize = open_checkpoint(config.model_dir).shapes, getattr(torch, config.dtype).itemsize
    weights = sum(math.prod(shape) for shape in shapes.values()) * itemsize
    logits = config.max_running * model_config.load(config.model_dir).vocab_size * _LOGIT_BYTES
    graphs = len(graph_sizes(config.recorded_rows)) * _GRAPH_BYTES if config.recorded_rows else 0
    return int(weights * _FRAGMENTATION) + _kv_bytes(config) + logits + _STEP_BYTES + graphs


def _kv_bytes(config: EngineConfig) -> int:
    return int(_KV_GIB["cuda" if config.device.startswith("cuda") else "cpu"] * GIB)
