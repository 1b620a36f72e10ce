"""Scheduler of proposers: which rows to look up before a step, and which model proposer to call for which rows.

Look-ups are cheap: each row has one before every step, and a row whose look-ups were not worth a draft backs off. A
model proposer is called if its learned acceptance rate and cost give more tokens per second than the proposals at hand
(`plan_call`). If calls do not pay, small trials keep both estimates current. Trials back off exponentially and are paid
from a budget, so that exploration takes at most 0.5 % of the step time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance import AcceptanceTracker
from engine.spec_decode.draft_plan import Call, CallOffer, plan_call
from engine.spec_decode.proposer import ModelProposer
from engine.spec_decode.step_cost import LearnedProposalCost, ProposalCost, StepCost

_T = TypeVar("_T")

# Backoff of rows. A look-up takes 15 us a row and 50 us a step behind cold caches, 2 % of a small model's step.
_MAX_MISSES = 8  # look-ups without a draft
_RETRY_EVERY, _RETRY_EVERY_IN_BATCH, _BATCH = 4, 8, 8  # steps, steps, rows

# Exploration.
_BUDGET_SHARE = 0.005  # of the time of steps
_FIRST_BUDGET, _MAX_BUDGET = 1.0, 64.0  # steps
_TRIAL_DRAFT_EVERY, _TRIAL_DRAFT_TOKENS, _TRIAL_DRAFT_CHANCE = 64, 3, 0.5
_MAX_TRIAL_INTERVAL, _KNOWN_TRIAL_INTERVAL = 128, 64  # steps; after a call that paid
_EXPECTED = 0.5  # acceptance rate above which a right proposal teaches nothing new
_MAX_TRIAL_DEPTH = 2  # tokens
# In tokens: trials of a resting proposer happen within the first 16 of an answer, and it collects state for 20.
_TRIAL_WITHIN, _FIRST_TOKENS = 16, 20

# Backoff of model proposers, in steps without a call that pays.
_PLAN_ALWAYS, _PLAN_EVERY, _PLAN_EVERY_RESTING, _REST_AFTER = 16, 8, 32, 256

_NEAR = 2  # tokens; missing after any step with a draft
_MIN_PIECE, _MAX_PIECE = 16, 512  # tokens of a prompt that one call computes
_FIRST_MEAN_ANSWER, _KEEP_MEAN = 64.0, 0.95  # tokens; weight of earlier answers


class ExplorationBudget:
    """Time that trials may take: one step at first, then a share of each step.

    Counted in steps, because the unit of StepCost changes once step times are known.
    """

    def __init__(self) -> None:
        self._saved = _FIRST_BUDGET
        self._step = 0.0  # cost of the last step; 0 before the first
        self._num_unpriced = 0

    def earn(self, step: float) -> None:
        """Count a step of this cost, and the uncosted ones before it."""
        self._step = step
        self._saved = min(self._saved + _BUDGET_SHARE * (1 + self._num_unpriced), _MAX_BUDGET)
        self._num_unpriced = 0

    def earn_uncosted(self) -> None:
        self._num_unpriced += 1

    def can_pay(self, cost: float) -> bool:
        return cost <= self._saved * self._step

    def pay(self, cost: float) -> None:
        self._saved -= cost / self._step


class PlannedCall(NamedTuple):
    """Work of a model proposer before a step."""

    call: Call
    catch_up: Seq[tuple[int, int]]  # rows that only catch up, and by how many tokens
    is_trial: bool


@dataclass(eq=False, slots=True)
class _Model:
    proposer: ModelProposer
    learned: LearnedProposalCost = field(default_factory=LearnedProposalCost)
    num_calls: int = 0
    steps_since_call: int = 0
    steps_since_gain: int = 0
    trial_interval: int = 0
    last_trial: tuple[Sequence, int, int] | None = None  # sequence, position, token; until the outcome is known
    num_trials: WeakKeyDictionary[Sequence, int] = field(default_factory=WeakKeyDictionary)
    is_resting: bool = True
    announced: int | None = None

    @property
    def is_trial_due(self) -> bool:
        return self.steps_since_call >= self.trial_interval

    @property
    def is_promising(self) -> bool:
        """True if a trial succeeded recently."""
        return self.trial_interval < _TRIAL_WITHIN

    def judge_trial(self) -> None:
        """Judge the last trial if its token is known.

        On success the next trial is due at once, else the interval doubles.
        """
        if self.last_trial is not None:
            sequence, position, token = self.last_trial
            if position < len(sequence.tokens):
                self.last_trial = None
                if sequence.tokens[position] == token:
                    self.trial_interval = 0
                else:
                    self.back_off()

    def back_off(self) -> None:
        self.trial_interval = min(max(1, 2 * self.trial_interval), _MAX_TRIAL_INTERVAL)

    def cost(self, step: StepCost) -> ProposalCost:
        """Return the learned cost; before the first call, a guess."""
        return self.learned.cost or ProposalCost(0.0, step.plain / 2, step.token)


class DraftScheduler:
    """Decides before each step which proposers run, and runs the model proposers. Owned by the step thread.

    A model proposer whose calls have not paid for 256 steps rests: it need not collect state in each step. It is then
    tried in the first tokens of answers that begin while a trial is due.
    """

    def __init__(
        self,
        models: Mapping[str, ModelProposer],
        tracker: AcceptanceTracker,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: seconds that calls of the models take."""
        self.budget = ExplorationBudget()
        self._models = {name: _Model(proposer) for name, proposer in models.items()}
        self._tracker = tracker
        self._clock = clock
        self._num_lookups = 0
        self._misses: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # look-ups since the last draft
        self._steps_without = 0  # steps without a draft, since the last trial draft
        self._steps_since_gain = 0
        self._mean_answer = _FIRST_MEAN_ANSWER
        self._spent_s = 0.0
        for model in self._models.values():
            self._announce(model)

    # Look-ups and drafts.

    def rows_to_look_up(self, rows: Seq[Sequence]) -> Seq[Sequence]:
        """Return the rows that are due. All rows under backoff are due in the same step."""
        self._num_lookups += 1
        if self._num_lookups % (_RETRY_EVERY if len(rows) < _BATCH else _RETRY_EVERY_IN_BATCH) == 0:
            return rows
        return [row for row in rows if self._misses.get(row, 0) < _MAX_MISSES]

    def note_lengths(self, lengths: Iterable[tuple[Sequence, int]]) -> None:
        """Note for each row that was looked up the draft length that was worth it."""
        for row, length in lengths:
            self._misses[row] = 0 if length else self._misses.get(row, 0) + 1

    def trial_draft(self, chances: Seq[Seq[float]], cost: StepCost, max_tokens: int) -> list[int]:
        """Return draft lengths for a step in which no draft pays: mostly 0, now and then a trial of the best row.

        The cost of drafts is learned only from steps that have some.
        """
        lengths = [0] * len(chances)
        self._steps_without += 1
        if self._steps_without >= _TRIAL_DRAFT_EVERY:
            best, row = max(((each[0], i) for i, each in enumerate(chances) if each), default=(0.0, 0))
            if best > _TRIAL_DRAFT_CHANCE:
                num_tokens = min(_TRIAL_DRAFT_TOKENS, len(chances[row]), max_tokens)
                extra = max(0.0, cost.step(num_tokens) - cost.plain)
                if self.budget.can_pay(extra):
                    self.budget.pay(extra)
                    lengths[row] = num_tokens
                    self._steps_without = 0
        return lengths

    # Model proposers.

    def may_call(self, rows: Seq[Sequence]) -> bool:
        """Return whether plan() may return a call for a step of these rows."""
        for model in self._models.values():
            model.judge_trial()
        return self._plans_calls() or any(
            model.is_resting and model.is_trial_due and any(row.num_generated <= _TRIAL_WITHIN for row in rows)
            for model in self._models.values()
        )

    def plan(
        self, rows: Seq[Sequence], limits: Seq[int], known: Seq[Seq[float]], cost: StepCost, max_tokens: int
    ) -> PlannedCall | None:
        """Return the call to make before a step of these rows, if any. Calls nothing.

        limits: maximum draft length of each row. known, max_tokens: see plan_call.
        """
        if max_tokens < 1 or not self.may_call(rows):
            return None
        behind = {name: [model.proposer.num_behind(row) for row in rows] for name, model in self._models.items()}
        if self._plans_calls():
            offers = [self._offer(name, rows, limits, behind[name], cost) for name in self._models]
            if call := plan_call(known, offers, cost, max_tokens):
                return self._in_pieces(call, behind[call.method], cost, is_trial=False)
        if trial := self._trial(rows, limits, behind, cost):
            return self._in_pieces(trial, behind[trial.method], cost, is_trial=True)
        return None

    def carry_out(self, planned: PlannedCall, rows: Seq[Sequence]) -> None:
        """Call the proposer and note its proposals."""
        call, spent_s, model = planned.call, self._spent_s, self._models[planned.call.method]
        if not planned.is_trial:
            self._steps_since_gain = model.steps_since_gain = -1
            model.trial_interval = _KNOWN_TRIAL_INTERVAL
            model.is_resting = False
            self._announce(model)
        for row, num_tokens in planned.catch_up:
            self._time(model, 0, num_tokens, partial(model.proposer.catch_up, rows[row], num_tokens))
        only_catch_up = {row for row, _ in planned.catch_up}
        called = [rows[row] for row in call.rows if row not in only_catch_up]
        known = [self._tracker.best(row) for row in called]
        if called:
            self._call(model, call, called)
        if planned.is_trial:
            for row in call.rows:
                model.num_trials[rows[row]] = model.num_trials.get(rows[row], 0) + 1
            self.budget.pay(self._spent_s - spent_s)
            for sequence, best in zip(called, known, strict=True):
                self._await_outcome(model, call.method, sequence, best.tokens[0] if best else None)

    def end_step(self) -> None:
        """Count a planned step, with a call or without."""
        self._steps_since_gain += 1
        for model in self._models.values():
            model.steps_since_call += 1
            model.steps_since_gain += 1
            model.is_resting = model.is_resting or model.steps_since_gain >= _REST_AFTER
            if model.is_resting:
                self._announce(model)

    def finished(self, sequence: Sequence) -> None:
        """Note that the sequence has its last token."""
        self._mean_answer = self._mean_answer * _KEEP_MEAN + sequence.num_generated * (1 - _KEEP_MEAN)
        self._drop_trial(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Free the state of a sequence that ended or paused here."""
        for model in self._models.values():
            model.proposer.forget(sequence)
        self._drop_trial(sequence)

    def take_spent_s(self) -> float:
        """Return the time that model proposers have taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _plans_calls(self) -> bool:
        if not self._models or self._steps_since_gain < _PLAN_ALWAYS:
            return bool(self._models)
        is_active = any(not model.is_resting or model.is_promising for model in self._models.values())
        return self._steps_since_gain % (_PLAN_EVERY if is_active else _PLAN_EVERY_RESTING) == 0

    def _offer(
        self, name: str, rows: Seq[Sequence], limits: Seq[int], behind: Seq[int | None], cost: StepCost
    ) -> CallOffer:
        chances: list[Seq[float]] = []
        missing: list[float] = []
        for sequence, limit, num_behind in zip(rows, limits, behind, strict=True):
            can_propose = num_behind is not None and limit > 0 and self._tracker.is_missing(name, sequence)
            expected = self._tracker.expected(name, sequence, limit) if can_propose else ()
            chances.append(expected)
            # Missing tokens before the last ones, mostly a prompt, are spread over the steps still to come.
            late = max(0, (num_behind or 0) - _NEAR)
            missing.append(min(num_behind or 0, _NEAR) + late / self._steps_left(sequence, expected))
        return CallOffer(name, self._models[name].cost(cost), chances, missing)

    def _steps_left(self, sequence: Sequence, expected: Seq[float]) -> float:
        """Estimate from the mean answer; an answer that is longer already is expected to double."""
        left = max(self._mean_answer - sequence.num_generated, float(sequence.num_generated), 1.0)
        return max(1.0, min(left, sequence.ends_at - len(sequence.tokens)) / (1.0 + sum(expected)))

    def _trial(
        self, rows: Seq[Sequence], limits: Seq[int], behind: Mapping[str, Seq[int | None]], cost: StepCost
    ) -> Call | None:
        """Try the proposer idle longest, on its least-tried row, of those the one with least to compute."""
        due = [name for name, model in self._models.items() if model.is_trial_due]
        if not due:
            return None
        name = max(due, key=lambda name: self._models[name].steps_since_call)
        model = self._models[name]
        # Varied, because first tokens may be easier than others; moved on while no answer is that long.
        turn = model.num_calls + model.steps_since_call // _MAX_TRIAL_INTERVAL
        first = turn * 5 % _TRIAL_WITHIN if model.is_resting and model.trial_interval else 0
        rows_by_trials = sorted(
            (model.num_trials.get(sequence, 0), num_behind, row)
            for row, sequence in enumerate(rows)
            if limits[row] > 0
            and sequence.num_generated >= first
            and self._tracker.is_missing(name, sequence)
            and (num_behind := behind[name][row]) is not None
        )
        for _, num_behind, row in rows_by_trials:
            depth = min(1 + model.num_calls % _MAX_TRIAL_DEPTH, limits[row])
            if self.budget.can_pay(model.cost(cost).seconds(depth, num_behind + depth - 1)):
                return Call(name, depth, [row])
        return None

    def _in_pieces(self, call: Call, behind: Seq[int | None], cost: StepCost, *, is_trial: bool) -> PlannedCall:
        """Compute no more missing tokens before one step than take as long as a step, shortest rows first."""
        token_s = self._models[call.method].cost(cost).token_s
        room = max(_MIN_PIECE, min(_MAX_PIECE, int(cost.plain / token_s) if token_s else _MAX_PIECE))
        catch_up: list[tuple[int, int]] = []
        rows: list[int] = []
        for num_behind, row in sorted((behind[row] or 0, row) for row in call.rows):
            if num_behind > max(_NEAR, room):
                if room <= 0:
                    continue
                catch_up.append((row, room))
            rows.append(row)
            room -= max(0, num_behind - _NEAR)
        return PlannedCall(Call(call.method, call.depth, sorted(rows)), catch_up, is_trial)

    def _call(self, model: _Model, call: Call, called: Seq[Sequence]) -> None:
        num_tokens = sum((model.proposer.num_behind(one) or 0) + call.depth - 1 for one in called)
        proposals = self._time(model, call.depth, num_tokens, partial(model.proposer.propose, called, call.depth))
        model.steps_since_call, model.num_calls = 0, model.num_calls + 1
        for sequence, proposal in zip(called, proposals, strict=True):
            self._tracker.note(call.method, sequence, proposal)

    def _await_outcome(self, model: _Model, name: str, sequence: Sequence, known: int | None) -> None:
        """Remember the trial until the next token is known, if that can be a surprise."""
        token = self._tracker.first_token(name, sequence)
        if token is None or token == known or self._tracker.first_rate(name) > _EXPECTED:
            model.back_off()
        else:
            model.last_trial = sequence, len(sequence.tokens), token

    def _drop_trial(self, sequence: Sequence) -> None:
        for model in self._models.values():
            if model.last_trial and model.last_trial[0] is sequence:
                model.last_trial = None

    def _announce(self, model: _Model) -> None:
        wanted = (_FIRST_TOKENS if model.is_trial_due or model.is_promising else 0) if model.is_resting else None
        if model.announced != wanted:
            model.announced = wanted
            model.proposer.rest(wanted)

    def _time(self, model: _Model, depth: int, num_tokens: int, work: Callable[[], _T]) -> _T:
        begin = self._clock()
        result = work()
        spent_s = self._clock() - begin
        self._spent_s += spent_s
        model.learned.observe(depth, num_tokens, spent_s)
        return result
