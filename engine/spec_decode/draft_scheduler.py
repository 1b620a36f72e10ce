"""Scheduler of proposers: which rows to look up before a step, and which model proposer to call for which rows.

Look-ups are cheap: each row has one before every step, and a row whose look-ups were not worth a draft backs off. A
model proposer is called if its learned acceptance rate and cost give more tokens per second than the proposals at hand
(`plan_call`). Otherwise 0.5 % of the total step time goes to trials of a token or two for one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance_rates import AcceptanceTracker
from engine.spec_decode.draft_plan import Call, CallOffer, plan_call
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.step_cost import LearnedProposalCost, ProposalCost, StepCost

_T = TypeVar("_T")

# Backoff of rows. A look-up takes 15 us a row and 50 us a step behind cold caches, 2 % of a small model's step.
_MAX_MISSES = 4  # look-ups without a draft
_RETRY_EVERY, _RETRY_EVERY_IN_BATCH, _BATCH = 4, 8, 8  # steps, steps, rows

# Time for trials, in steps, because the unit of StepCost changes once step times are known. The lower bound is for the
# state that a resting proposer collects before a trial.
_TRIAL_SHARE, _MIN_TRIAL_COST, _MAX_SAVED = 0.005, 0.05, 4.0
_FIRST_TOKENS = 20  # a resting proposer collects state for these while a trial is affordable

# Backoff of model proposers, in steps without a call that pays.
_PLAN_ALWAYS, _PLAN_EVERY, _PLAN_EVERY_RESTING, _REST_AFTER = 16, 8, 32, 256

_NEAR = 2  # tokens; up to this many are missing after any step with a draft
_MIN_PIECE, _MAX_PIECE = 16, 512  # tokens of a prompt that one call computes
_FIRST_MEAN_ANSWER, _KEEP_MEAN = 64.0, 0.95  # tokens; weight of earlier answers


@dataclass(eq=False, slots=True)
class _Model:
    proposer: ModelProposer
    learned: LearnedProposalCost = field(default_factory=LearnedProposalCost)
    num_trials: int = 0
    steps_since_call: int = 0
    steps_since_gain: int = _REST_AFTER
    trial_cost: float = _MIN_TRIAL_COST  # of a row with nothing to catch up, in steps
    announced: int | None = None

    @property
    def is_resting(self) -> bool:
        return self.steps_since_gain >= _REST_AFTER

    def announce(self, num_first: int | None) -> None:
        if self.announced != num_first:
            self.announced = num_first
            self.proposer.rest(num_first)

    def cost(self, step: StepCost) -> ProposalCost:
        """Return the learned cost; before the first call, a guess."""
        return self.learned.cost or ProposalCost(0.0, step.plain / 2, step.token)


class DraftScheduler:
    """Decides before each step which proposers run, and runs the model proposers. Owned by the step thread.

    A model proposer whose calls have not paid for 256 steps rests: it need not collect state in each step. Trials then
    use the first tokens of answers.
    """

    def __init__(
        self,
        models: Mapping[str, ModelProposer],
        tracker: AcceptanceTracker,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: seconds, to time the calls of the models."""
        self._models = {name: _Model(proposer) for name, proposer in models.items()}
        self._tracker = tracker
        self._clock = clock
        self._num_lookups = 0
        self._misses: dict[Sequence, int] = {}  # look-ups since the last draft
        self._backing_off: Seq[Sequence] | None = None  # rows of the last step, if all of them were
        self._saved = 1.0
        self._mean_answer = _FIRST_MEAN_ANSWER
        self._spent_s = 0.0
        for model in self._models.values():
            model.announce(_FIRST_TOKENS)

    def skips(self, rows: Seq[Sequence]) -> bool:
        """Return True, and count the step, if all rows are under backoff and no model proposer may be called."""
        if self._models or rows != self._backing_off or self._is_retry(rows):
            return False
        self._num_lookups += 1
        return True

    def rows_to_look_up(self, rows: Seq[Sequence]) -> Seq[Sequence]:
        """Return the rows that are due. All rows under backoff are due in the same step."""
        is_retry = self._is_retry(rows)
        self._num_lookups += 1
        if is_retry:
            return rows
        due = [row for row in rows if self._misses.get(row, 0) < _MAX_MISSES]
        self._backing_off = None if due else list(rows)
        return due

    def note_lengths(self, lengths: Iterable[tuple[Sequence, int]]) -> None:
        """Record the draft length chosen for each row that was looked up."""
        for row, length in lengths:
            self._misses[row] = 0 if length else self._misses.get(row, 0) + 1
            if length:
                self._backing_off = None

    def may_call(self, rows: Seq[Sequence]) -> bool:
        """Return whether plan() may return a call for a step of these rows."""
        if not self._models:
            return False
        is_first = any(row.num_generated <= _FIRST_TOKENS for row in rows)
        return any(
            self._is_planned(model) or (model.trial_cost <= self._saved and (is_first or not model.is_resting))
            for model in self._models.values()
        )

    def plan(
        self, rows: Seq[Sequence], limits: Seq[int], known: Seq[Seq[float]], cost: StepCost, max_tokens: int
    ) -> Call | None:
        """Return the call to make before a step of these rows, if any. Calls nothing.

        limits: maximum draft length of each row. known, max_tokens: see plan_call.
        """
        if max_tokens < 1 or not self.may_call(rows):
            return None
        behind = {name: [model.proposer.num_behind(row) for row in rows] for name, model in self._models.items()}
        offers = {name: self._offer(name, rows, limits, behind[name], cost) for name in self._models}
        planned = [offer for name, offer in offers.items() if self._is_planned(self._models[name])]
        if call := plan_call(known, planned, cost, max_tokens):
            return self._in_pieces(call, behind[call.method], cost)
        for name in sorted(offers, key=lambda name: -self._models[name].steps_since_call):
            if trial := self._trial(offers[name], behind[name], cost):
                return self._in_pieces(trial, behind[name], cost)
        return None

    def carry_out(self, call: Call, rows: Seq[Sequence], cost: StepCost) -> None:
        """Call the proposer and note its proposals."""
        spent_s, model = self._spent_s, self._models[call.method]
        for row, num_tokens in call.catch_up:
            self._time(model, 0, num_tokens, partial(model.proposer.catch_up, rows[row], num_tokens))
        if called := [rows[row] for row in call.rows]:
            num_tokens = sum((model.proposer.num_behind(one) or 0) + call.depth - 1 for one in called)
            propose = partial(model.proposer.propose, called, call.depth)
            for sequence, proposal in zip(called, self._time(model, call.depth, num_tokens, propose), strict=True):
                self._tracker.note(call.method, sequence, proposal)
        model.steps_since_call = -1
        if call.is_trial:
            model.num_trials += 1
            model.trial_cost = max(_MIN_TRIAL_COST, model.cost(cost).seconds(1, 1) / cost.plain)
            self._saved -= max(_MIN_TRIAL_COST, (self._spent_s - spent_s) / cost.plain)
        else:
            model.steps_since_gain = -1

    def end_step(self) -> None:
        """Count a planned step, with a call or without."""
        self._saved = min(self._saved + _TRIAL_SHARE, _MAX_SAVED)
        for model in self._models.values():
            model.steps_since_call += 1
            model.steps_since_gain += 1
            can_pay = model.trial_cost <= self._saved
            model.announce((_FIRST_TOKENS if can_pay else 0) if model.is_resting else None)

    def finished(self, sequence: Sequence) -> None:
        """Note that the sequence has its last token."""
        self._mean_answer = self._mean_answer * _KEEP_MEAN + sequence.num_generated * (1 - _KEEP_MEAN)

    def forget(self, sequence: Sequence) -> None:
        """Free the state of a sequence that ended or paused here."""
        self._misses.pop(sequence, None)
        self._backing_off = None
        for model in self._models.values():
            model.proposer.forget(sequence)

    def take_spent_s(self) -> float:
        """Return the time that model proposers have taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _is_retry(self, rows: Seq[Sequence]) -> bool:
        """Return whether rows under backoff are due in the next step."""
        return (self._num_lookups + 1) % (_RETRY_EVERY if len(rows) < _BATCH else _RETRY_EVERY_IN_BATCH) == 0

    def _is_planned(self, model: _Model) -> bool:
        """Return whether to consider a call in this step: soon after one that paid, after a trial, and periodically."""
        steps = model.steps_since_gain
        is_turn = steps % (_PLAN_EVERY_RESTING if model.is_resting else _PLAN_EVERY) == 0
        return is_turn or steps < _PLAN_ALWAYS or model.steps_since_call == 0

    def _offer(
        self, name: str, rows: Seq[Sequence], limits: Seq[int], behind: Seq[int | None], cost: StepCost
    ) -> CallOffer:
        chances: list[Seq[float]] = []
        missing: list[float] = []
        for sequence, limit, num_behind in zip(rows, limits, behind, strict=True):
            can_propose = num_behind is not None and limit > 0 and self._tracker.is_missing(name, sequence)
            expected = self._tracker.expected(name, sequence, limit) if can_propose else ()
            chances.append(expected)
            # Spread the cost of missing tokens before the last ones, mostly a prompt's, over the remaining steps.
            late = max(0, (num_behind or 0) - _NEAR)
            missing.append(min(num_behind or 0, _NEAR) + late / self._steps_left(sequence, expected))
        return CallOffer(name, self._models[name].cost(cost), chances, missing)

    def _steps_left(self, sequence: Sequence, expected: Seq[float]) -> float:
        """Estimate from the mean answer length; an answer past half of it is expected to double."""
        left = max(self._mean_answer - sequence.num_generated, float(sequence.num_generated), 1.0)
        return max(1.0, min(left, sequence.ends_at - len(sequence.tokens)) / (1.0 + sum(expected)))

    def _trial(self, offer: CallOffer, behind: Seq[int | None], cost: StepCost) -> Call | None:
        """Return a trial call for one row, if the time saved for trials covers it. Rows take turns."""
        model = self._models[offer.method]
        depth = 1 + model.num_trials % 2
        can_try: list[int] = []
        for row, (chances, num_behind) in enumerate(zip(offer.chances, behind, strict=True)):
            num_tokens = (num_behind or 0) + depth - 1
            if len(chances) >= depth and offer.cost.seconds(depth, num_tokens) <= self._saved * cost.plain:
                can_try.append(row)
        if not can_try:
            return None
        return Call(offer.method, depth, [can_try[model.num_trials % len(can_try)]], is_trial=True)

    def _in_pieces(self, call: Call, behind: Seq[int | None], cost: StepCost) -> Call:
        """Limit the missing tokens before one step to those that take as long as the step; shortest rows first."""
        token_s = self._models[call.method].cost(cost).token_s
        room = max(_MIN_PIECE, min(_MAX_PIECE, int(cost.plain / token_s) if token_s else _MAX_PIECE))
        catch_up: list[tuple[int, int]] = []
        ready: list[int] = []
        for num_behind, row in sorted((behind[row] or 0, row) for row in call.rows):
            if num_behind <= max(_NEAR, room):
                ready.append(row)
            elif room > 0:
                catch_up.append((row, room))
            room -= max(0, num_behind - _NEAR)
        return replace(call, rows=sorted(ready), catch_up=catch_up)

    def _time(self, model: _Model, depth: int, num_tokens: int, work: Callable[[], _T]) -> _T:
        begin = self._clock()
        result = work()
        spent_s = self._clock() - begin
        self._spent_s += spent_s
        model.learned.observe(depth, num_tokens, spent_s)
        return result
