"""Speculative decoding of a replica: proposals, draft lengths, and outcomes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from core.types.request import DraftTally
from core.types.step_timing import StepTiming
from engine.kv.block_manager import BlockManager
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance_rates import AcceptanceTracker
from engine.spec_decode.draft_plan import plan_drafts
from engine.spec_decode.draft_scheduler import DraftScheduler
from engine.spec_decode.proposer import ModelProposer, Proposer
from engine.spec_decode.step_cost import FREE, StepCost
from engine.spec_decode.suffix import Corpus, Suffix
from engine.spec_decode.verify import Draft, take_room, take_state_slots

# Applied to the cost of draft tokens: a token drafted for one row delays all others, and choosing the best of many
# estimates favors overestimates.
_MARGIN = 1.5
_COST_USES = 16  # steps that reuse a cost: it changes slowly, and reading the measured times takes time


@dataclass(eq=False, slots=True)
class DraftCounts:
    """Drafted and accepted tokens of one method, by place in the draft."""

    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


class Speculation:
    """Proposers of a replica, and the drafts made of their proposals. Owned by the step thread."""

    def __init__(
        self,
        lookups: Mapping[str, Proposer],
        *,
        models: Mapping[str, ModelProposer] = MappingProxyType({}),
        max_tokens: int,
        vocab_size: int,
        backs_off: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """lookups, models: proposers by method; each row is drafted by the one with the most expected tokens.

        max_tokens: maximum draft length. backs_off: False to look up every row before every step. clock: seconds, to
        time the calls of the models.
        """
        every = [*lookups, *models]
        self.counts = {method: DraftCounts() for method in every}
        self._lookups = lookups
        self._models = models
        self._max_tokens = max_tokens
        self._backs_off = backs_off
        self._tracker = AcceptanceTracker(every, max_tokens=max_tokens, vocab_size=vocab_size)
        self._scheduler = DraftScheduler(models, self._tracker, clock=clock)

    @classmethod
    def of(
        cls,
        method: str,
        *,
        models: Mapping[str, ModelProposer] = MappingProxyType({}),
        corpus: Corpus | None = None,
        **settings: Any,
    ) -> Speculation:
        """method: `ngram`, `suffix`, a key of `models`, or `auto` for `suffix` and all models.

        `ngram` is `suffix` without finished answers. corpus: None for a new one. settings: the other arguments.
        """
        lookups: dict[str, Proposer] = {}
        if method == "ngram":
            lookups[method] = Suffix()
        elif method in ("suffix", "auto"):
            lookups["suffix"] = Suffix(corpus or Corpus())
        chosen = {name: proposer for name, proposer in models.items() if method in (name, "auto")}
        return cls(lookups, models=chosen, **settings)

    def draft(
        self, rows: Seq[Sequence], cost_of: Callable[[], StepCost], *, max_tokens: int, blocks: BlockManager
    ) -> dict[Sequence, Draft]:
        """Return drafts for rows that are about to compute their last token, and allocate blocks for them.

        max_tokens: limit of all drafts together. cost_of: called only if there may be a draft.
        """
        if not (looked_up := self._look_up(rows)):
            self._scheduler.end_step()
            return {}
        cost, limits = cost_of(), [self._limit(row) for row in looked_up]
        chances = self._chances(looked_up, limits)
        if call := self._scheduler.plan(looked_up, limits, chances, cost, max_tokens):
            self._scheduler.carry_out(call, looked_up, cost)
            chances = self._chances(looked_up, limits)
        self._scheduler.end_step()
        lengths = plan_drafts(chances, len(rows), cost, max_tokens)
        self._scheduler.note_lengths(zip(looked_up, lengths, strict=True))
        drafts: dict[Sequence, Draft] = {}
        for row, length in zip(looked_up, lengths, strict=True):
            if length and (proposal := self._tracker.best(row)):
                num_blocks = len(row.blocks)
                if taken := take_room(row, length, blocks):
                    drafts[row] = Draft(
                        tokens=proposal.tokens[:taken],
                        num_blocks=num_blocks,
                        method=proposal.method,
                        state_slots=take_state_slots(row, taken, blocks),
                    )
        return drafts

    def would_draft(self, rows: Seq[Sequence], cost_of: Callable[[], StepCost], *, max_tokens: int) -> bool:
        """Return whether draft() would draft or call a model for the rows as they are. Calls no model."""
        if not (looked_up := self._look_up(rows)):
            self._scheduler.end_step()
            return False
        cost, limits = cost_of(), [self._limit(row) for row in looked_up]
        chances = self._chances(looked_up, limits)
        lengths = plan_drafts(chances, len(rows), cost, max_tokens)
        self._scheduler.note_lengths(zip(looked_up, lengths, strict=True))
        if any(lengths) or self._scheduler.plan(looked_up, limits, chances, cost, max_tokens):
            return True
        self._scheduler.end_step()
        return False

    def skips(self, rows: Seq[Sequence]) -> bool:
        """Return True, and count the step, if nothing would be drafted because all rows are under backoff."""
        return self._scheduler.skips(rows)

    def has_proposal(self, row: Sequence) -> bool:
        """Return whether any proposer had a proposal the last time the row was looked up."""
        return self._tracker.has_any(row)

    def verified(self, draft: Draft, chosen: Seq[int]) -> None:
        """Count a draft, once the next tokens of its sequence are chosen."""
        counts = self.counts[draft.method]
        counts.drafted.update(range(len(draft.tokens)))
        counts.accepted.update(range(draft.num_right(chosen)))

    def finished(self, sequence: Sequence) -> None:
        """Note that the sequence has its last token."""
        for proposer in self._lookups.values():
            proposer.finished(sequence)
        self._scheduler.finished(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the state of a sequence that ended or paused here."""
        self._tracker.forget(sequence)
        self._scheduler.forget(sequence)

    def take_model_s(self) -> float:
        """Return the time that the step thread has waited for model proposers since the last call."""
        return self._scheduler.take_spent_s()

    def _limit(self, row: Sequence) -> int:
        """Return the maximum draft length: the step chooses one more token, and none beyond the end."""
        return max(0, min(self._max_tokens, row.most_tokens - len(row.tokens), row.ends_at - len(row.tokens) - 1))

    def _look_up(self, rows: Seq[Sequence]) -> Seq[Sequence]:
        """Propose by look-up for the rows that are due.

        Returns the rows with up-to-date proposals: the due ones, or all if a model may be called. Empty if there is
        nothing to draft from, which is the common case in new text.
        """
        due: Seq[Sequence] = ()
        if self._lookups:
            due = self._scheduler.rows_to_look_up(rows) if self._backs_off else rows
        current = rows if self._scheduler.may_call(rows) else due
        if not current:
            return ()
        self._tracker.learn(current)
        for method, proposer in self._lookups.items():
            if missing := [row for row in due if self._tracker.is_missing(method, row)]:
                for row, proposal in zip(missing, proposer.propose(missing, self._max_tokens), strict=True):
                    if proposal.tokens:
                        self._tracker.note(method, row, proposal)
        if not self._models and not any(map(self._tracker.has_any, current)):
            self._scheduler.note_lengths((row, 0) for row in current)
            return ()
        return current

    def _chances(self, rows: Seq[Sequence], limits: Seq[int]) -> list[Seq[float]]:
        """Return the chances of each row's best proposal, cut to its limit."""
        best = map(self._tracker.best, rows)
        return [proposal.chances[:limit] if proposal else () for proposal, limit in zip(best, limits, strict=True)]


class StepTimes(Protocol):
    """Measured times of a replica's steps."""

    @property
    def timing(self) -> StepTiming | None: ...

    @property
    def draft_factors(self) -> Seq[float]:
        """See LearnedDraftCost.factors."""
        ...

    def set_aside(self, seconds: float, /) -> None:
        """Exclude these seconds, spent in model proposers, from the time of the next step."""
        ...


class Drafting:
    """Engine side of speculation: fits drafts into the token and time budget of a step. Owned by the step thread."""

    def __init__(
        self,
        speculation: Speculation | None,
        times: StepTimes | None,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
    ) -> None:
        """speculation: None to draft nothing. times: None to draft everything that may be accepted."""
        self._speculation = speculation
        self._times = times
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        # Cost of the last planned step, its size, and how often steps of that size have reused the cost.
        self._cost, self._cost_of, self._cost_uses = FREE, (0, 0), _COST_USES
        self._break_even = 0.0

    @property
    def is_on(self) -> bool:
        return self._speculation is not None

    def drafts(
        self, decoding: Seq[tuple[Sequence, int]], prompts: Seq[tuple[Prompt, int]], whole: Seq[Prompt]
    ) -> dict[Sequence, Draft]:
        """Return drafts for the decoding rows of a step; see ScheduledStep for its rows.

        Drafts stay within the token limit of a step, and within the number of logits that there is memory for. Do not
        call this for a step that is launched behind another one.
        """
        if self._speculation is None or not decoding:
            return {}
        rows = [sequence for sequence, _ in decoding]
        if self._speculation.skips(rows):
            return {}
        num_tokens = sum(num_tokens for _, num_tokens in (*decoding, *prompts))
        num_logits = len(rows) + sum(len(prompt.choices) for prompt in whole)
        room = min(self._max_batch_tokens - num_tokens, self._max_running - num_logits)
        if room < 1:
            return {}
        cost_of = partial(self._step_cost, rows, num_tokens)
        drafts = self._speculation.draft(rows, cost_of, max_tokens=room, blocks=self._blocks)
        if self._times and (model_s := self._speculation.take_model_s()):
            self._times.set_aside(model_s)
        return drafts

    def awaits(self, running: Collection[Sequence]) -> bool:
        """Return True if the next step should wait for the tokens of the step in flight, in order to have drafts."""
        room, rows = self._max_running - len(running), list(running)
        if self._speculation is None or room < 1 or self._speculation.skips(rows):
            return False
        return self._speculation.would_draft(rows, partial(self._step_cost, rows, len(rows)), max_tokens=room)

    def computed(self, decoding: Seq[tuple[Sequence, int]], drafts: Mapping[Sequence, Draft]) -> None:
        """Tally a completed step, before its rows get their tokens."""
        if self._speculation is None or not decoding:
            return
        if self._cost_of[0] != len(decoding):
            self._step_cost([row for row, _ in decoding], sum(num_tokens for _, num_tokens in decoding))
        for row, _ in decoding:
            tally = row.drafts
            if tally is None:
                tally = row.drafts = DraftTally()
            tally.steps += 1
            tally.floors += self._break_even
            if row not in drafts and not self._speculation.has_proposal(row):
                tally.unguessed += 1

    def verified(self, draft: Draft, chosen: Seq[int]) -> None:
        """Count a draft, once the next tokens of its sequence are chosen."""
        assert self._speculation
        self._speculation.verified(draft, chosen)

    def finished(self, sequence: Sequence) -> None:
        """Note that the sequence has its last token."""
        if self._speculation:
            self._speculation.finished(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the state of a sequence that ended or paused here."""
        if self._speculation:
            self._speculation.forget(sequence)

    def _step_cost(self, rows: Seq[Sequence], num_tokens: int) -> StepCost:
        self._cost_uses += 1
        if self._cost is FREE or self._cost_uses > _COST_USES or self._cost_of != (len(rows), num_tokens):
            self._cost = self._measured_cost(rows, num_tokens)
            self._cost_of, self._cost_uses = (len(rows), num_tokens), 0
            self._break_even = self._cost.break_even(len(rows))
        return self._cost

    def _measured_cost(self, rows: Seq[Sequence], num_tokens: int) -> StepCost:
        timing = self._times.timing if self._times else None
        if self._times is None or timing is None:
            return FREE
        num_context = sum(len(sequence.tokens) for sequence in rows)
        plain_s = timing.step_s(num_tokens=num_tokens, num_pairs=0, num_context=num_context)
        if not plain_s:
            return FREE
        return StepCost(
            plain=plain_s, token=timing.token_s * _MARGIN, num_tokens=num_tokens, factors=self._times.draft_factors
        )
