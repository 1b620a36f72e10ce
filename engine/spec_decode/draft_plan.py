"""Pure choice of the draft lengths of a step, and of the rows to call a model proposer for.

Both maximize tokens per second over all rows of the step. At a rate of r tokens per second, a second costs r tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

from engine.spec_decode.step_cost import ProposalCost, StepCost

_MIN_DRAFT_GAIN = 1.01  # planning takes time, too
_MIN_CALL_GAIN = 1.02  # costs and rates are estimates, and the flattering ones are chosen
_MAX_ROUNDS = 4


def plan_drafts(chances: Seq[Seq[float]], num_rows: int, cost: StepCost, max_tokens: int) -> list[int]:
    """Return the draft length of each row, of max_tokens together; all 0 if drafts gain nothing.

    chances: by row and place, that the token and all before it are right. num_rows: rows that get one token anyway.
    """
    floor = cost.break_even(num_rows)
    tokens = sorted((-chance, row) for row, own in enumerate(chances) for chance in own if chance > floor)[:max_tokens]
    best, best_rate = 0, num_rows / cost.plain * (_MIN_DRAFT_GAIN if cost.token else 1.0)
    expected = float(num_rows)
    for count, (chance, _) in enumerate(tokens, 1):
        expected -= chance
        rate = expected / cost.step(count)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = [0] * len(chances)
    for _, row in tokens[:best]:
        lengths[row] += 1
    return lengths


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
