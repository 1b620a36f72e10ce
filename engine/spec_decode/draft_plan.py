"""How many tokens to draft for each row of a step, and in which branches: as many as make tokens come soonest, all rows
together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.timing.draft_cost import factor_of


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step takes: seconds; or anything in proportion, where nobody is asked whose answers take time."""

    plain: float  # without drafts
    token: float  # each drafted token
    num_tokens: int = 0  # that a step has without drafts
    factors: Seq[float] = (1.0,)  # times what both come to, where anything is drafted: see engine.timing.draft_cost
    context: float = 0.0  # each position that a row more reads

    def step(self, num_drafted: int, beside: float = 0.0) -> float:
        """beside: what is computed for that and is no token of the step, as tokens."""
        if not num_drafted:
            return self.plain
        return (self.plain + self.token * (num_drafted + beside)) * self.factor(num_drafted)

    def factor(self, num_drafted: int) -> float:
        """Of a step with so many."""
        return factor_of(self.factors, self.num_tokens + num_drafted)

    def floor(self, num_rows: int) -> float:
        """The chance above which a drafted token can pay: beside the tokens that so many rows get anyway."""
        return self.token * num_rows / self.plain

    def fork(self, num_context: int) -> float:
        """Tokens that could be drafted instead of one row more behind so many positions, but for its own tokens."""
        return _FORK + self.context * num_context / self.token if self.token else 0.0


class BranchOffer(NamedTuple):
    """What may be computed beside a row's draft."""

    row: int
    place: int  # in the draft: it needs so many tokens of that
    chances: Seq[float]  # of each of its tokens, that it and all before it are right
    num_again: int  # tokens that are computed for it once more
    fork: float  # see StepPrice


class DraftPlan(NamedTuple):
    lengths: list[int]  # of each row's draft
    branches: list[int]  # of each offer, how much of it is taken


_LEAST_GAIN = 1.01  # to guess takes time, too
_FORK = 1.0  # tokens: to copy a block, and to tell of a row
FREE = StepPrice(plain=1.0, token=0.0)  # nobody knows: whatever may be right is drafted


# Tokens that are taken together or not at all, for they pay together. In order the best comes first, and of what is as
# good what must come first: what they bring over what they cost, below 0; whether they are a branch's; the number of
# the row, or of the offer; the place of the first; their chances, added up; their price, in tokens; tokens that are
# computed once more for them; how many they are. (No class: a step has many, and is short.)
_Part = tuple[float, bool, int, int, float, float, int, int]


def plan_drafts(chances: Seq[Seq[float]], num_rows: int, price: StepPrice, max_tokens: int) -> list[int]:
    """The lengths for which tokens / seconds is greatest, at most so many tokens together; none where that is hardly
    more than without any.

    chances: of each drafted token of each row, that it and all before it are right: so they fall along a row.
    num_rows: that get a token anyway.
    """
    return plan_tree(chances, (), num_rows, price, max_tokens).lengths


def plan_tree(
    chances: Seq[Seq[float]], offers: Seq[BranchOffer], num_rows: int, price: StepPrice, max_tokens: int
) -> DraftPlan:
    """The same with branches beside the drafts."""
    # By a line, no token pays that would not pay alone, beside those that come anyway.
    floor = price.floor(num_rows)
    parts: list[_Part] = [
        (-chance, False, i, place, chance, 1.0, 0, 1)
        for i, row in enumerate(chances)
        for place, chance in enumerate(row)
        if chance > floor
    ]
    for number, offer in enumerate(offers):
        parts += [part for part in _parts_of(number, offer) if -part[0] > floor]
    best, best_rate = 0, num_rows / price.plain * (_LEAST_GAIN if price.token else 1.0)
    taken: list[tuple[bool, int, int]] = []
    without = set[int]()  # branches whose first part has no room
    expected, cost, room = float(num_rows), 0.0, max_tokens
    for _, is_branch, number, _, value, part_cost, num_again, length in sorted(parts):
        num_tokens = num_again + length
        if num_tokens > room or (is_branch and number in without):
            if is_branch:
                without.add(number)
            continue
        taken.append((is_branch, number, length))
        expected, cost, room = expected + value, cost + part_cost, room - num_tokens
        num_drafted = max_tokens - room
        rate = expected / price.step(num_drafted, cost - num_drafted)
        if rate > best_rate:
            best, best_rate = len(taken), rate
    plan = DraftPlan([0] * len(chances), [0] * len(offers))
    for is_branch, number, length in taken[:best]:
        (plan.branches if is_branch else plan.lengths)[number] += length
    return plan


def _parts_of(number: int, offer: BranchOffer) -> list[_Part]:
    """The first so many tokens for which a branch brings most for what it costs, and each of the others."""
    beside = offer.num_again + offer.fork
    sums = list(accumulate(offer.chances))
    density, length = max((value / (beside + i), i) for i, value in enumerate(sums, 1))
    first = (-density, True, number, 0, sums[length - 1], beside + length, offer.num_again, length)
    rest = enumerate(offer.chances[length:], length)
    return [first, *((-chance, True, number, place, chance, 1.0, 0, 1) for place, chance in rest)]
