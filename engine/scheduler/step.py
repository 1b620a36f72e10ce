"""One step of an engine: its rows, its results, and the interfaces that execute it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from core.types.request import SampledToken
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.rows import RowChanges
from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler.next_tokens import NextTokens
from engine.scheduler.prompt_scoring import ScoredRow, Scores
from engine.scheduler.prompts import Prompt
from engine.scheduler.row_updates import LastRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.step_commands import Orders
from engine.spec_decode.verify import Draft

Logits = TypeVar("Logits", covariant=True)


@dataclass(eq=False, kw_only=True)
class ScheduledStep:
    """Rows of one step, in order, and the data that belongs to it."""

    decoding: list[tuple[Sequence, int]]  # number of last tokens each computes: one, plus forced ones
    prompts: list[tuple[Prompt, int]]  # number of tokens of each chunk
    last_rows: LastRows
    next_tokens: NextTokens | None = None  # set if the step is a pure decode step
    # drafted tokens that decoding rows compute in addition
    drafts: Mapping[Sequence, Draft] = field(default_factory=dict)
    whole: list[Prompt] = field(default_factory=list)  # prompts that are complete after this step
    scored: list[ScoredRow] = field(default_factory=list)  # rows whose prompt tokens are scored
    # See RowChanges.
    state_writes: list[tuple[int, int, int]] = field(default_factory=list)
    scores: Scores | None = None  # set by the runner that computes the step
    fetched: list[Prompt] = field(default_factory=list)  # fetch-only prompts that are finished
    has_failed_fetch: bool = False  # the fetch of a prompt admitted for this step failed; the next step may admit it
    known: list[tuple[Sequence, SampledToken]] = field(default_factory=list)  # forced tokens appended before the step
    orders: Orders = field(default_factory=Orders)
    device_tokens: DeviceTokens | None = None  # tokens of this step that are only on the device so far
    logits: Any = None  # kept if drafts are verified token by token
    # One per decoding sequence, then one per choice of each complete prompt.
    sampled: Sampled | None = None

    @cached_property
    def has_rows(self) -> bool:
        return bool(self.decoding or self.prompts)

    def has_row_of(self, sequence: Sequence) -> bool:
        """Return True if the step computes tokens of the sequence."""
        prompts = (prompt.sequence for prompt, _ in self.prompts)
        return any(one is sequence for one, _ in self.decoding) or any(one is sequence for one in prompts)

    def take_early_results(self, ahead: ScheduledStep) -> None:
        """Move the results that planning `ahead` produced into this step.

        The moved results are final, and their sequences may leave before `ahead` completes.
        """
        self.known, ahead.known = self.known + ahead.known, []
        self.fetched, ahead.fetched = self.fetched + ahead.fetched, []

    def sampling_rows(self) -> tuple[list[SamplingRow], list[int] | None]:
        """Return the rows to sample and the positions of their logits; None for the positions if they are in order.

        Decoding sequences come first, then every choice of each complete prompt. A row with a draft adds one row per
        drafted token, unless each choice depends on the one before it.
        """
        if self.next_tokens:
            return self.next_tokens.rows.sampling_rows, None
        if self.drafts:
            return self._sampling_rows_with_drafts()
        rows = [sequence.sampling_row for sequence, _ in self.decoding]
        if not self.whole:
            return rows, None
        positions = list(range(len(rows)))
        for position, prompt in enumerate(self.whole, len(rows)):
            rows += [prompt.sequence.sampling_row_of(choice) for choice in prompt.choices]
            positions += [position] * len(prompt.choices)
        return rows, positions if len(rows) > len(self.decoding) + len(self.whole) else None

    def _sampling_rows_with_drafts(self) -> tuple[list[SamplingRow], list[int] | None]:
        rows: list[SamplingRow] = []
        positions: list[int] = []
        first_logits = 0
        for sequence, _ in self.decoding:
            row, draft = sequence.sampling_row, self.drafts.get(sequence)
            rows.append(row)
            positions.append(first_logits)
            if draft:
                draft.first_logits, num_drafted = first_logits, len(draft.tokens)
                if not row.is_sequential(num_drafted):
                    rows += [row.behind(i) for i in range(1, num_drafted + 1)]
                    positions += range(first_logits + 1, first_logits + num_drafted + 1)
                first_logits += num_drafted
            first_logits += 1
        for position, prompt in enumerate(self.whole, first_logits):
            rows += [prompt.sequence.sampling_row_of(choice) for choice in prompt.choices]
            positions += [position] * len(prompt.choices)
        # Without positions the sampler works on the logits in place: a copy would take megabytes per step.
        is_in_order = positions == list(range(first_logits + len(self.whole)))
        return rows, None if is_in_order else positions

    def store_scores(self) -> None:
        """Store the scores of this step on their prompts."""
        if not self.scored:
            return
        assert self.scores, "the runner has not set the scores of this step's prompts"
        for row, scores in zip(self.scored, self.scores(), strict=True):
            prompt, _ = self.prompts[row.row - len(self.decoding)]
            prompt.scores.append(scores)

    @property
    def num_tokens(self) -> int:
        num_drafted = sum(len(draft.tokens) for draft in self.drafts.values())
        return num_drafted + sum(num_tokens for _, num_tokens in (*self.decoding, *self.prompts))

    @cached_property
    def changes(self) -> RowChanges:
        """Difference from the rows of the previous step, computed on first use."""
        if self.next_tokens and (changes := self.last_rows.next_tokens(self.next_tokens)):
            return changes
        sequences = [sequence for sequence, _ in self.decoding] + [prompt.sequence for prompt, _ in self.prompts]
        num_tokens = [num_tokens for _, num_tokens in (*self.decoding, *self.prompts)]
        drafts = {row: self.drafts[one].tokens for row, (one, _) in enumerate(self.decoding) if one in self.drafts}
        return self.last_rows.changes(sequences, num_tokens, self.scored, drafts, self.state_writes)

    @cached_property
    def batch(self) -> Batch:
        return self.last_rows.apply(self.changes, self.device_tokens)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompt whose KV is complete, and the first token of each choice."""

    prompt: Prompt
    tokens: list[SampledToken]
    sequences: list[Sequence] = field(default_factory=list)  # one per token, if the engine decodes


@dataclass(slots=True)
class StepResult:
    """Results of a step."""

    did_work: bool  # False: there was nothing to do
    num_computed: int = 0  # tokens of prompts and of preempted sequences
    fetched: list[Prompt] = field(default_factory=list)  # see ScheduledStep
    prefilled: list[Prefilled] = field(default_factory=list)
    # of decoding sequences, usually one each
    sampled: list[tuple[Sequence, SampledToken]] = field(default_factory=list)
    num_known: int = 0  # forced tokens among `sampled`
    num_rows: int = 0  # decoding rows
    num_drafted: int = 0  # drafted tokens that the decoding rows computed
    failed: list[Sequence] = field(default_factory=list)  # removed because no next token could be chosen; see Sampler


class Runner(Protocol[Logits]):
    """Executor of steps: a model in this process, the leading rank of a gang, or a simulator."""

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Logits | None:
        """Carry out the orders, then compute the step, if there is one.

        Returns the logits that its rows need, (positions, vocabulary) fp32; the next step may overwrite them. Sets the
        step's `scores` if it has scored rows.
        """
        ...


class KVConnector(Protocol):
    """Transfer of KV into and out of an engine's blocks. The engine calls it twice per step.

    The first call precedes the choice of rows, because a prompt whose KV is fetched must not be computed. The second
    follows it, because a sender must know the rows that it ships; only a prefill replica looks at the rows there.
    """

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        """Start fetches for newly admitted prompts, before the rows are chosen.

        These prompts own their blocks from now on.
        """
        ...

    def orders(self, step: ScheduledStep) -> Orders:
        """Return the commands that every rank runs before it computes this step.

        The rows are chosen by now and may read tokens of a step in flight, so only `begin_step` removes sequences.
        """
        ...


class NoConnector:
    """KVConnector of an engine that computes all KV itself."""

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        pass

    def orders(self, step: ScheduledStep) -> Orders:
        return Orders()
