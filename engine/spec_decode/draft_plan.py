"""Pure choice of the draft lengths of a step, and of the rows to call a model proposer for.

Both maximize tokens per second over all rows of the step. At this rate r, one more second costs r tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.spec_decode.step_cost import ProposalCost, StepCost

_MIN_DRAFT_GAIN = 1.01  # planning takes time, too
_MIN_CALL_GAIN = 1.02  # choosing the best of many estimates favors overestimates


def plan_drafts(chances: Seq[Seq[float]], num_rows: int, cost: StepCost, max_tokens: int) -> list[int]:
    """Return the draft length of each row, at most max_tokens in total; all 0 if drafts gain nothing.

    chances: by row and place, that all tokens up to there are right. num_rows: rows that get one token anyway.
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
    catch_up: Seq[tuple[int, int]] = ()  # further rows that only compute this many of their missing tokens
    is_trial: bool = False


def plan_call(known: Seq[Seq[float]], offers: Seq[CallOffer], cost: StepCost, max_tokens: int) -> Call | None:
    """Return the call that gives most tokens per second; None if the known proposals are as good.

    known: chances of the proposals at hand. max_tokens: draft tokens of all rows.
    """
    rate = _MIN_CALL_GAIN * _rate(known, cost, max_tokens, call_s=0.0)
    best, best_rate = None, rate
    for offer in offers:
        if call := _most_gain(known, offer, cost, rate, max_tokens):
            called = {row: offer.chances[row][: call.depth] for row in call.rows}
            num_computed = sum(offer.missing[row] + call.depth - 1 for row in call.rows)
            after = [called.get(row, chances) for row, chances in enumerate(known)]
            call_rate = _rate(after, cost, max_tokens, call_s=offer.cost.seconds(call.depth, num_computed))
            if call_rate > best_rate:
                best, best_rate = call, call_rate
    return best


def _rate(chances: Seq[Seq[float]], cost: StepCost, max_tokens: int, *, call_s: float) -> float:
    """Return the tokens per second if each row drafts as many of its proposed tokens as is best."""
    lengths = plan_drafts(chances, len(chances), cost, max_tokens)
    expected = sum(sum(row[:length]) for row, length in zip(chances, lengths, strict=True))
    return (len(chances) + expected) / (cost.step(sum(lengths)) + call_s)


def _most_gain(known: Seq[Seq[float]], offer: CallOffer, cost: StepCost, rate: float, max_tokens: int) -> Call | None:
    """Return the call that gains most if a second costs `rate` tokens. Each row is then decided by itself."""
    price, own = rate * cost.token * cost.factor(1), offer.cost  # price: of a draft token, in tokens
    best, best_gain = None, 0.0
    gains = [
        -sum(max(chance - price, 0.0) for chance in known[row]) - rate * own.token_s * (missing - 1)
        for row, missing in enumerate(offer.missing)
    ]
    for depth in range(1, max(map(len, offer.chances), default=0) + 1):
        found: list[tuple[float, int]] = []
        for row, chances in enumerate(offer.chances):
            gains[row] += max(chances[depth - 1] - price, 0.0) if depth <= len(chances) else 0.0
            gains[row] -= rate * own.token_s
            if chances and gains[row] > 0:
                found.append((gains[row], row))
        found = sorted(found, reverse=True)[: -(-max_tokens // depth)]
        gain = sum(each for each, _ in found) - rate * (own.call_s + own.depth_s * depth)
        if gain > best_gain:
            best, best_gain = Call(offer.method, depth, sorted(row for _, row in found)), gain
    return best
