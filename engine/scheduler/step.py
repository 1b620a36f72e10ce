"""One step on its way through an engine: what takes part in it, what executes it, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

from core.types.request import SampledToken
from engine.batch.batch import Batch, DeviceTokens
from engine.batch.rows import Row, RowChanges
from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler.next_tokens import NextTokens
from engine.scheduler.prompt_scoring import ScoredRow, Scores
from engine.scheduler.prompts import Prompt
from engine.scheduler.row_updates import LastRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.step_commands import Orders
from engine.spec_decode.draft import Draft

Logits = TypeVar("Logits", covariant=True)


@dataclass(eq=False, kw_only=True)
class ScheduledStep:
    """The rows of a step, in this order, and what belongs to it."""

    decoding: list[tuple[Sequence, int]]  # each computes its last tokens: one, and those that were known
    prompts: list[tuple[Prompt, int]]  # and how many tokens of each
    last_rows: LastRows
    next_tokens: NextTokens | None = None  # where it computes these, and nothing else
    drafts: Mapping[Sequence, Draft] = field(default_factory=dict)  # what some of those that decode compute beyond
    whole: list[Prompt] = field(default_factory=list)  # of these, those of which nothing is missing then
    scored: list[ScoredRow] = field(default_factory=list)  # of the prompts that ask for it
    scores: Scores | None = None  # of these; whoever computes the step sets it
    fetched: list[Prompt] = field(default_factory=list)  # those that only fetch, and have got what there is
    known: list[tuple[Sequence, SampledToken]] = field(default_factory=list)  # what sequences got before it
    orders: Orders = field(default_factory=Orders)
    device_tokens: DeviceTokens | None = None  # those that are computed here before anybody knows them
    logits: Any = None  # where some drafts are judged one token after another
    sampled: Sampled | None = None  # of every sequence that decodes; then, for each prompt that is whole, every choice

    @property
    def has_rows(self) -> bool:
        return bool(self.decoding or self.prompts)

    def take_what_came_before(self, ahead: ScheduledStep) -> None:
        """What the next step has brought about when it was planned is told with this one: nobody waits for it, and
        those whom it is about may leave before that step is over."""
        self.known, ahead.known = self.known + ahead.known, []
        self.fetched, ahead.fetched = self.fetched + ahead.fetched, []

    def sampling_rows(self) -> tuple[list[SamplingRow], list[int] | None]:
        """Whose next token is to be chosen: that of every sequence that decodes; then, for each prompt that is whole,
        one for every choice. And where the logits of each are; None: in this order. Of a row with a draft, also what
        follows each drafted token, and each of its branches, but where that must wait for the choice before it."""
        if self.next_tokens:  # mostly
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
        in_branches = len(self.decoding) + len(self.whole) + sum(len(draft.tokens) for draft in self.drafts.values())
        for sequence, _ in self.decoding:
            row, draft = sequence.sampling_row, self.drafts.get(sequence)
            rows.append(row)
            positions.append(first_logits)
            if draft:
                draft.first_logits, num_drafted = first_logits, len(draft.tokens)
                goes_at_once = not row.goes_one_by_one(draft.depth)
                if goes_at_once:
                    rows += [row.behind(i) for i in range(1, num_drafted + 1)]
                    positions += range(first_logits + 1, first_logits + num_drafted + 1)
                first_logits += num_drafted
                for branch in draft.branches:
                    branch.first_logits, count = in_branches, len(branch.tokens)
                    if goes_at_once:
                        rows += [row.behind(branch.place + i) for i in range(1, count + 1)]
                        positions += range(in_branches, in_branches + count)
                    in_branches += count
            first_logits += 1
        for position, prompt in enumerate(self.whole, first_logits):
            rows += [prompt.sequence.sampling_row_of(choice) for choice in prompt.choices]
            positions += [position] * len(prompt.choices)
        # Where all are chosen at once, nobody reads them again, and a step has megabytes of them.
        is_in_order = positions == list(range(in_branches))
        return rows, None if is_in_order else positions

    def note_scores(self) -> None:
        """Tell the prompts that are scored what this step has said of them."""
        if not self.scored:
            return
        assert self.scores, "whoever computed this step has not told what was asked of its prompts"
        for row, scores in zip(self.scored, self.scores(), strict=True):
            prompt, _ = self.prompts[row.row - len(self.decoding)]
            prompt.scores.append(scores)

    @property
    def num_tokens(self) -> int:
        num_drafted = sum(draft.num_tokens for draft in self.drafts.values())
        return num_drafted + sum(num_tokens for _, num_tokens in (*self.decoding, *self.prompts))

    @property
    def branches(self) -> list[Row]:
        """The last rows of the step, behind those of its sequences."""
        pairs = ((one, self.drafts[one]) for one, _ in self.decoding if one in self.drafts)
        return [branch.row(sequence, draft) for sequence, draft in pairs for branch in draft.branches]

    @property
    def forks(self) -> list[tuple[int, int]]:
        """Blocks that are copied for these, before the step: source, target."""
        copies = (branch.copy(one) for one, draft in self.drafts.items() for branch in draft.branches)
        return [copy for copy in copies if copy]

    @cached_property
    def changes(self) -> RowChanges:
        """What is different from the rows of the step before; made when a runner asks for it, or for the batch."""
        if self.next_tokens and (changes := self.last_rows.next_tokens(self.next_tokens)):
            return changes
        sequences = [sequence for sequence, _ in self.decoding] + [prompt.sequence for prompt, _ in self.prompts]
        num_tokens = [num_tokens for _, num_tokens in (*self.decoding, *self.prompts)]
        drafts = {row: self.drafts[one].tokens for row, (one, _) in enumerate(self.decoding) if one in self.drafts}
        return self.last_rows.changes(sequences, num_tokens, self.scored, drafts, self.branches if drafts else ())

    @cached_property
    def batch(self) -> Batch:
        return self.last_rows.apply(self.changes, self.device_tokens)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose KV is whole, and the first token of each of its choices."""

    prompt: Prompt
    tokens: list[SampledToken]
    sequences: list[Sequence] = field(default_factory=list)  # one for each token, where the engine decodes


@dataclass(slots=True)
class StepResult:
    """What came of a step."""

    did_work: bool  # False: there was nothing to do
    num_computed: int = 0  # tokens of prompts, and of sequences that were preempted
    fetched: list[Prompt] = field(default_factory=list)  # see ScheduledStep
    prefilled: list[Prefilled] = field(default_factory=list)
    sampled: list[tuple[Sequence, SampledToken]] = field(default_factory=list)  # of those that decode: mostly one each
    num_known: int = 0  # of these, those that were known before anything was computed
    num_rows: int = 0  # that decoded
    num_drafted: int = 0  # tokens that these computed beside their own
    failed: list[Sequence] = field(default_factory=list)  # these have no next token, and are gone; see Sampler

    @property
    def num_generated(self) -> int:
        return len(self.sampled) + sum(len(prefilled.tokens) for prefilled in self.prefilled)


class Runner(Protocol[Logits]):
    """Computes steps: a model in this process, a rank that leads its gang, or what only takes the time."""

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> Logits | None:
        """Carry out the orders, then compute the step, if there is one.

        Returns the logits that its rows want, (positions, vocabulary) fp32; the next step may overwrite them. Where
        rows are scored, the step has its `scores` then.
        """
        ...


class KVConnector(Protocol):
    """Brings KV to the blocks of an engine from elsewhere, and takes it elsewhere. In every step it has two moments:
    before the rows are chosen, since a prompt whose KV is brought is none to compute; and after, since who ships what a
    step computes must know its rows. Only a prefill replica needs the second."""

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        """Before the rows are chosen. These prompts have their blocks from now on; where KV for them is elsewhere, it
        is to be brought."""
        ...

    def orders(self, step: ScheduledStep) -> Orders:
        """What every rank does before it computes this step. Its rows are chosen, some of them perhaps to go on from
        tokens that a step under way chooses: whoever is to leave has left in `begin_step`."""
        ...


class NoConnector:
    """Implements KVConnector for an engine that computes everything itself."""

    def begin_step(self, admitted: Seq[Prompt]) -> None:
        pass

    def orders(self, step: ScheduledStep) -> Orders:
        return Orders()
