"""When proposers that compute are asked: where that is expected to pay, and now and then to know whether it would."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence
from engine.spec_decode.ask_plan import Offer, Plan, plan_ask
from engine.spec_decode.ask_price import AskPrice, LearntAskPrice
from engine.spec_decode.draft_plan import StepPrice
from engine.spec_decode.guesses import Guesses
from engine.spec_decode.proposer import Computing, Proposal
from engine.spec_decode.purse import Purse

_T = TypeVar("_T")

_TRY_EVERY, _TRY_RESTING_EVERY = 64, 128  # looks after which nobody was asked
_NUM_FIRST = 16  # trials that follow each other as soon as they can be paid
_REST_AFTER = 256  # looks in which it was not worth asking
_TRY_WITHIN, _KNOWN_OF_TRIED = 16, 20  # tokens of an answer, and what a method that rests need know of it for that
_FIRST_TRIED, _MOST_TRIED = 2, 4  # tokens at most
_IN_VAIN, _PLAN_EVERY, _RESTING_EVERY = 16, 8, 32  # looks: a plan takes 0.1 ms and more
_PLANS_KEPT = 4  # looks for which a plan that pays is good
_NEAR = 2  # tokens: so many a sequence that was drafted for in the last step lacks, too
_FEWEST, _MOST = 16, 512  # tokens of a prompt that are computed before a step
_ANSWER = 64.0  # tokens, in the mean, until some are known
_KEEP = 0.95  # weight of earlier answers


class _Tried(NamedTuple):
    """What was said in a trial of the next token of a sequence."""

    sequence: Sequence
    position: int
    token: int

    @property
    def may_be_right(self) -> bool:
        tokens = self.sequence.tokens
        return self.position >= len(tokens) or tokens[self.position] == self.token


@dataclass(eq=False, slots=True)
class _Method:
    proposer: Computing
    learned: LearntAskPrice = field(default_factory=LearntAskPrice)
    num_asked: int = 0  # times
    num_looks: int = 0  # since then
    num_in_vain: int = 0  # looks since it was worth it
    num_tried: WeakKeyDictionary[Sequence, int] = field(default_factory=WeakKeyDictionary)
    rests: bool = True
    told: int | None = None  # by `rest`, the last time
    tried: _Tried | None = None  # where nobody else has said the same

    @property
    def is_to_be_tried(self) -> bool:
        """As soon as that can be paid."""
        most = _TRY_RESTING_EVERY if self.rests else _TRY_EVERY
        return self.num_asked < _NUM_FIRST or self.num_looks >= most or self.surprises

    @property
    def surprises(self) -> bool:
        """It was right in the last trial, or that is not known yet: more of them will tell."""
        return self.tried is not None and self.tried.may_be_right

    def forget(self, sequence: Sequence) -> None:
        """What was said of it will not be known."""
        if self.tried and self.tried.sequence is sequence:
            self.tried = None

    def price(self, step: StepPrice) -> AskPrice:
        """Until it has been asked, a guess."""
        return self.learned.price or AskPrice(0.0, step.plain / 2, step.token)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan that pays, while nothing that it was made of is another thing."""

    plan: Plan
    rows: Seq[Sequence]
    most: int  # looks that it may serve yet


@dataclass(frozen=True, slots=True)
class Ask:
    """What to do before a step."""

    plan: Plan
    late: Seq[tuple[int, int]]  # of these the rows that can only catch up yet, and by how many tokens
    is_trial: bool


class Asking:
    """Owned by the step thread. It pays to ask where, in tokens a second, what is promised by place beats what is
    guessed anyway (`plan_ask`), with the price of asking as it was the last times. What a proposer has to catch up
    with, a prompt above all, is spread over the steps that its sequence is expected to take yet; and it is computed in
    pieces, none of which takes longer than a step.

    What asking costs, and how often it is right, is not known of who is never asked. So trials are made, of one row,
    from a purse: they cost no more than goes into it, also the first few of a method, which wait for nothing else.

    A method for which it has not been worth it, yet or for long, rests: it need not gather what it would have to know
    of each row. It is tried in the first tokens of an answer then, of one that begins when a trial is due. Where it is
    right in that, and nobody else was, more trials follow as soon as they can be paid: so it wakes in time."""

    def __init__(
        self,
        methods: Mapping[str, Computing],
        guesses: Guesses,
        purse: Purse,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """purse: somebody else puts into it. clock: seconds of whoever computes."""
        self._methods = {name: _Method(proposer) for name, proposer in methods.items()}
        self._guesses = guesses
        self._clock = clock
        self._purse = purse
        self._num_in_vain = 0  # looks since it was worth asking
        self._mean_answer = _ANSWER
        self._spent_s = 0.0
        self._last: Plan | None = None  # that was made
        self._kept: _Kept | None = None
        for method in self._methods.values():
            self._tell(method)

    def is_due(self, rows: Seq[Sequence]) -> bool:
        """Whether there may be a plan for a step of these rows."""
        return self._plans() or (
            any(one.rests and one.is_to_be_tried for one in self._methods.values())
            and any(row.num_generated <= _TRY_WITHIN for row in rows)
        )

    def _plans(self) -> bool:
        """Where it is in vain, a plan is made every few looks."""
        if not self._methods or self._num_in_vain < _IN_VAIN:
            return bool(self._methods)
        rest = all(one.rests for one in self._methods.values())
        return self._num_in_vain % (_RESTING_EVERY if rest else _PLAN_EVERY) == 0

    def plan(
        self,
        rows: Seq[Sequence],
        most: Seq[int],
        guessed: Seq[Seq[float]],
        price: StepPrice,
        max_tokens: int,
    ) -> Ask | None:
        """Whom to ask before a step of these rows; None: nobody. Looks only.

        most: tokens that may be drafted for each. guessed, max_tokens: see `plan_ask`."""
        if max_tokens < 1 or not self.is_due(rows):
            return None
        behind = {name: [one.proposer.num_behind(row) for row in rows] for name, one in self._methods.items()}
        plan = self._kept_plan(rows, most, guessed, behind, max_tokens)
        if plan is None and self._plans():
            offers = [self._offer(name, rows, most, behind[name], price) for name in self._methods]
            plan = plan_ask(guessed, offers, price, max_tokens)
            if plan and plan == self._last and not any(guessed):  # chances have settled
                self._kept = _Kept(plan, list(rows), _PLANS_KEPT)
            self._last = plan
        if plan:
            return self._in_pieces(plan, behind[plan.method], price, is_trial=False)
        trial = self._trial(rows, most, behind, price)
        return self._in_pieces(trial, behind[trial.method], price, is_trial=True) if trial else None

    def carry_out(self, ask: Ask, rows: Seq[Sequence]) -> None:
        """Ask, and note what is said."""
        spent_s, method = self._spent_s, self._methods[ask.plan.method]
        if not ask.is_trial:
            self._num_in_vain = method.num_in_vain = -1
            method.rests = False
            self._tell(method)
        for row, num_tokens in ask.late:
            self._time(method, 0, num_tokens, partial(method.proposer.catch_up, rows[row], num_tokens))
        late = {row for row, _ in ask.late}
        method.tried = None
        if asked := [rows[row] for row in ask.plan.rows if row not in late]:
            known = self._guesses.best(asked[0])[1] if ask.is_trial else None
            said = self._ask(method, ask.plan, asked)[0].tokens
            if ask.is_trial and said and not (known and known.tokens[0] == said[0]):
                method.tried = _Tried(asked[0], len(asked[0].tokens), said[0])
        if ask.is_trial:
            for row in ask.plan.rows:
                method.num_tried[rows[row]] = method.num_tried.get(rows[row], 0) + 1
            self._purse.pay(self._spent_s - spent_s)

    def looked(self) -> None:
        """A step is made, whether somebody has planned or not."""
        self._num_in_vain += 1
        for method in self._methods.values():
            method.num_looks += 1
            method.num_in_vain += 1
            method.rests = method.rests or method.num_in_vain >= _REST_AFTER
            if method.rests:
                self._tell(method)

    def finished(self, sequence: Sequence) -> None:
        """It has its last token."""
        self._mean_answer = self._mean_answer * _KEEP + sequence.num_generated * (1 - _KEEP)
        for method in self._methods.values():
            method.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """It gets no more tokens here, or none for now."""
        for method in self._methods.values():
            method.proposer.forget(sequence)
            method.forget(sequence)

    def take_spent_s(self) -> float:
        """What asking has taken since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s

    def _kept_plan(
        self,
        rows: Seq[Sequence],
        most: Seq[int],
        guessed: Seq[Seq[float]],
        behind: Mapping[str, Seq[int | None]],
        max_tokens: int,
    ) -> Plan | None:
        """To plan takes a part of what a small step takes; and from step to step little changes."""
        kept, self._kept = self._kept, None
        if kept is None or kept.rows != rows or any(guessed):
            return None
        plan = kept.plan
        behind_R = behind[plan.method]
        is_near = all((num_behind := behind_R[row]) is not None and num_behind <= _NEAR for row in plan.rows)
        if not is_near or any(most[row] < plan.depth for row in plan.rows) or max_tokens < plan.depth * len(plan.rows):
            return None
        self._kept = replace(kept, most=kept.most - 1) if kept.most > 1 else None
        return plan

    def _offer(
        self, name: str, rows: Seq[Sequence], most: Seq[int], behind: Seq[int | None], price: StepPrice
    ) -> Offer:
        method = self._methods[name]
        chances: list[Seq[float]] = []
        missing: list[float] = []
        for sequence, num_tokens, num_behind in zip(rows, most, behind, strict=True):
            promised: Seq[float] = ()
            if num_behind is not None and num_tokens > 0 and self._guesses.is_missing(name, sequence):
                promised = self._guesses.promised(name, sequence, num_tokens)
            chances.append(promised)
            late = max(0, (num_behind or 0) - _NEAR)
            missing.append(min(num_behind or 0, _NEAR) + late / self._steps_to_come(sequence, promised))
        return Offer(name, method.price(price), chances, missing)

    def _steps_to_come(self, sequence: Sequence, promised: Seq[float]) -> float:
        """An answer takes as long as others did, and one that is longer already as long again."""
        left = max(self._mean_answer - sequence.num_generated, float(sequence.num_generated), 1.0)
        return max(1.0, min(left, sequence.ends_at - len(sequence.tokens)) / (1.0 + sum(promised)))

    def _trial(
        self, rows: Seq[Sequence], most: Seq[int], behind: Mapping[str, Seq[int | None]], price: StepPrice
    ) -> Plan | None:
        """Of who has waited for longest; a row for which it was tried the fewest times, and of those the one for which
        it has least to do."""
        due = [name for name, one in self._methods.items() if one.is_to_be_tried]
        if not due:
            return None
        name = max(due, key=lambda name: self._methods[name].num_looks)
        method = self._methods[name]
        # Not always the first token, which may be likelier than others; and not for ever one that no answer has.
        num_waited = method.num_looks // _TRY_RESTING_EVERY
        least = (method.num_asked + num_waited) * 5 % _TRY_WITHIN if method.rests and not method.surprises else 0
        near = [
            (method.num_tried.get(sequence, 0), num_behind, row)
            for row, sequence in enumerate(rows)
            if most[row] > 0
            and sequence.num_generated >= least
            and self._guesses.is_missing(name, sequence)
            and (num_behind := behind[name][row]) is not None
        ]
        most_tried = _FIRST_TRIED if method.num_asked < _NUM_FIRST else _MOST_TRIED
        for _, num_behind, row in sorted(near):
            depth = min(1 + method.num_asked % most_tried, most[row])
            if self._purse.can_pay(method.price(price).seconds(depth, num_behind + depth - 1)):
                return Plan(name, depth, [row])
        return None

    def _in_pieces(self, plan: Plan, behind: Seq[int | None], price: StepPrice, *, is_trial: bool) -> Ask:
        """Of all that is missing no more than what takes as long as a step, those first that lack least."""
        token_s = self._methods[plan.method].price(price).token_s
        room = max(_FEWEST, min(_MOST, int(price.plain / token_s) if token_s else _MOST))
        late: list[tuple[int, int]] = []
        asked: list[int] = []
        for num_behind, row in sorted((behind[row] or 0, row) for row in plan.rows):
            if num_behind <= max(_NEAR, room):
                asked.append(row)
            elif room > 0:
                late.append((row, room))
            else:
                continue
            room -= max(0, num_behind - _NEAR)
        rows_now = sorted(asked + [row for row, _ in late])
        return Ask(Plan(plan.method, plan.depth, rows_now), late, is_trial)

    def _ask(self, method: _Method, plan: Plan, asked: Seq[Sequence]) -> Seq[Proposal]:
        proposer, depth = method.proposer, plan.depth
        num_tokens = sum((proposer.num_behind(one) or 0) + depth - 1 for one in asked)
        proposals = self._time(method, depth, num_tokens, partial(proposer.propose, asked, depth))
        method.num_looks, method.num_asked = 0, method.num_asked + 1
        for sequence, proposal in zip(asked, proposals, strict=True):
            self._guesses.note(plan.method, sequence, proposal)
        return proposals

    def _tell(self, method: _Method) -> None:
        """Whether it rests; and that it gathers nothing while no trial is due."""
        wanted = (_KNOWN_OF_TRIED if method.is_to_be_tried else 0) if method.rests else None
        if method.told != wanted:
            method.told = wanted
            method.proposer.rest(wanted)

    def _time(self, method: _Method, depth: int, num_tokens: int, work: Callable[[], _T]) -> _T:
        begin = self._clock()
        result = work()
        spent_s = self._clock() - begin
        self._spent_s += spent_s
        method.learned.saw(depth, num_tokens, spent_s)
        return result
