"""Pure choice of the draft lengths of a step, and of the rows to call a model proposer for.

Both maximize tokens per second over all rows of the step. At a rate of r tokens per second, a second costs r tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from engine.spec_decode.step_cost import ProposalCost, StepCost

_MIN_DRAFT_GAIN = 1.01  # planning takes time, too
_MIN_CALL_GAIN = 1.02  # costs and rates are estimates, and the flattering ones are chosen
_MAX_ROUNDS = 4


class BranchOffer(NamedTuple):
    """Branch that the step may compute beside a row's draft."""

    row: int
    place: int  # it needs that many tokens of the draft
    chances: Seq[float]  # by token, that it and all before it are right
    num_again: int  # tokens that are computed once more for it
    fork: float  # see StepCost.fork


class DraftPlan(NamedTuple):
    lengths: list[int]  # of each row's draft
    branches: list[int]  # tokens taken of each offer


# Tokens taken together or not at all, because they pay together. A plain tuple, for speed; its order is the order in
# which parts are taken: (-tokens per cost, is branch, number of the row or offer, first place, sum of the chances, cost
# in tokens, tokens computed again, tokens).
_Part = tuple[float, bool, int, int, float, float, int, int]


def plan_drafts(chances: Seq[Seq[float]], num_rows: int, cost: StepCost, max_tokens: int) -> list[int]:
    """Return the draft length of each row; all 0 if drafts gain nothing.

    chances: by row and place, that the token and all before it are right. num_rows: rows that get one token anyway.
    """
    return plan_tree(chances, (), num_rows, cost, max_tokens).lengths


def plan_tree(
    chances: Seq[Seq[float]], offers: Seq[BranchOffer], num_rows: int, cost: StepCost, max_tokens: int
) -> DraftPlan:
    """Return the draft lengths and the branches, of max_tokens together."""
    floor = cost.break_even(num_rows)
    parts: list[_Part] = [
        (-chance, False, i, place, chance, 1.0, 0, 1)
        for i, row in enumerate(chances)
        for place, chance in enumerate(row)
        if chance > floor
    ]
    for number, offer in enumerate(offers):
        parts += [part for part in _parts_of(number, offer) if -part[0] > floor]
    best, best_rate = 0, num_rows / cost.plain * (_MIN_DRAFT_GAIN if cost.token else 1.0)
    taken: list[tuple[bool, int, int]] = []
    rejected = set[int]()  # offers whose first part has no room
    expected, work, room = float(num_rows), 0.0, max_tokens
    for _, is_branch, number, _, value, part_cost, num_again, length in sorted(parts):
        num_tokens = num_again + length
        if num_tokens > room or (is_branch and number in rejected):
            if is_branch:
                rejected.add(number)
            continue
        taken.append((is_branch, number, length))
        expected, work, room = expected + value, work + part_cost, room - num_tokens
        num_draft_tokens = max_tokens - room
        rate = expected / cost.step(num_draft_tokens, work - num_draft_tokens)
        if rate > best_rate:
            best, best_rate = len(taken), rate
    plan = DraftPlan([0] * len(chances), [0] * len(offers))
    for is_branch, number, length in taken[:best]:
        (plan.branches if is_branch else plan.lengths)[number] += length
    return plan


def _parts_of(number: int, offer: BranchOffer) -> list[_Part]:
    """Return the first tokens of the branch, as many as give most per cost, and each further token."""
    overhead = offer.num_again + offer.fork
    sums = list(accumulate(offer.chances))
    density, length = max((value / (overhead + i), i) for i, value in enumerate(sums, 1))
    first = (-density, True, number, 0, sums[length - 1], overhead + length, offer.num_again, length)
    rest = enumerate(offer.chances[length:], length)
    return [first, *((-chance, True, number, place, chance, 1.0, 0, 1) for place, chance in rest)]


@dataclass(frozen=True, slots=True)
class CallOffer:
    """Expected result of calling a model proposer."""

    method: str
    cost: ProposalCost
    chances: Seq[Seq[float]]  # by row and place; empty for a row that cannot be proposed for
    missing: Seq[float]  # by row, tokens that are computed before it can propose


@dataclass(frozen=True, slots=True)
class Call:
    """Call of a model proposer before a step."""

    method: str
    depth: int  # tokens for each row
    rows: Seq[int]


def plan_call(known: Seq[Seq[float]], offers: Seq[CallOffer], cost: StepCost, max_tokens: int) -> Call | None:
    """Return the call that gives most tokens per second; None if the known proposals are as good.

    known: chances of the proposals at hand. max_tokens: draft tokens of all rows. At a given rate each row decides for
    itself; the rate rises until no better call is found (Dinkelbach 1967).
    """
    lengths = plan_drafts(known, len(known), cost, max_tokens)
    expected = sum(sum(row[:length]) for row, length in zip(known, lengths, strict=True))
    rate = _MIN_CALL_GAIN * (len(known) + expected) / cost.step(sum(lengths))
    best: Call | None = None
    for _ in range(_MAX_ROUNDS):
        found = [_best_call(known, offer, cost, rate, max_tokens) for offer in offers]
        call, call_rate = max(found, key=lambda one: one[1], default=(None, 0.0))
        if call is None or call_rate <= rate:
            break
        best, rate = call, call_rate
    return best


def _best_call(
    known: Seq[Seq[float]], offer: CallOffer, cost: StepCost, rate: float, max_tokens: int
) -> tuple[Call | None, float]:
    """Return the call with the largest gain at this rate, and the rate that it gives."""
    price = rate * cost.token * cost.factor(1)  # of a draft token, in tokens
    own = offer.cost
    gains: list[list[tuple[float, int]]] = [[] for _ in range(max(map(len, offer.chances), default=0))]
    for row, chances in enumerate(offer.chances):
        if chances:
            gain = -sum(max(chance - price, 0.0) for chance in known[row])
            gain -= rate * own.token_s * (offer.missing[row] - 1)
            for chance, found in zip(chain(chances, repeat(0.0)), gains, strict=False):
                gain += max(chance - price, 0.0) - rate * own.token_s
                if gain > 0:
                    found.append((gain, row))
    totals = [
        sum(gain for gain, _ in found) - rate * (own.call_s + own.depth_s * depth)
        for depth, found in enumerate(gains, 1)
    ]
    if not totals or max(totals) <= 0:
        return None, 0.0
    depth = 1 + max(range(len(totals)), key=totals.__getitem__)
    rows = sorted(row for _, row in sorted(gains[depth - 1], reverse=True)[: -(-max_tokens // depth)])
    called = set(rows)
    every = (offer.chances[row][:depth] if row in called else chances for row, chances in enumerate(known))
    drafted = sorted((chance for chances in every for chance in chances if chance > price), reverse=True)[:max_tokens]
    call_s = own.seconds(depth, sum(offer.missing[row] + depth - 1 for row in rows))
    tokens = accumulate(drafted, initial=float(len(known)))
    return Call(offer.method, depth, rows), max(count / (cost.step(i) + call_s) for i, count in enumerate(tokens))
