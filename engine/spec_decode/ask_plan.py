"""Whether to ask a proposer that computes: for which rows, and for how many tokens.

The best plan is the one with most tokens a second. Let r be that rate: a second is worth r tokens then, so that the
plan is also the one with most tokens beyond what its seconds are worth (Dinkelbach 1967). For a given r each row
decides for itself between what is guessed for it anyway and what asking promises, and r grows with each plan that is
better, until none is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.spec_decode.ask_price import AskPrice
from engine.spec_decode.draft_plan import StepPrice, plan_drafts

# R rows of the step, D places of a draft

Floats = NDArray[np.float64]

_LEAST_GAIN = 1.02  # over what is guessed anyway: prices and chances are learnt, and those that flatter are taken
_MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """What a method is expected to give."""

    method: str
    price: AskPrice
    chances: Seq[Seq[float]]  # of each row, by place, that the token and all before are right; empty: not to be asked
    missing: Seq[float]  # tokens of each row that it computes before it can guess, beside those that it guesses


@dataclass(frozen=True, slots=True)
class Plan:
    method: str
    depth: int  # tokens to ask for
    rows: Seq[int]


def plan_ask(guessed: Seq[Seq[float]], offers: Seq[Offer], price: StepPrice, max_tokens: int) -> Plan | None:
    """The offer that is worth taking, with the rows that are to be asked for; None: what is guessed anyway is as good.

    guessed: of each row, of each token that is known already to be likely, that it and all before it are right.
    max_tokens: drafted tokens of all rows together.
    """
    lengths = plan_drafts(guessed, len(guessed), price, max_tokens)
    expected = sum(sum(row[:length]) for row, length in zip(guessed, lengths, strict=True))
    least = _LEAST_GAIN * (len(guessed) + expected) / price.step(sum(lengths))
    guessed_RD = _padded(guessed)
    tables = [(offer, _padded(offer.chances), np.array(offer.missing)) for offer in offers if any(offer.chances)]
    rate, best = least, None
    for _ in range(_MOST_ROUNDS):
        found = [_best(guessed_RD, *table, price, rate, max_tokens) for table in tables]
        plan, plan_rate = max(found, key=lambda one: one[1], default=(None, 0.0))
        if plan is None or plan_rate <= rate:
            break
        rate, best = plan_rate, plan
    return best


def _best(
    guessed_RD: Floats,
    offer: Offer,
    chances_RD: Floats,
    missing_R: Floats,
    price: StepPrice,
    rate: float,
    max_tokens: int,
) -> tuple[Plan | None, float]:
    """Where a second is worth `rate` tokens; and what the plan gives."""
    token = price.token * price.factor(1)
    given_R = _values(guessed_RD, rate * token)[:, -1]
    can_R = chances_RD[:, 0] > 0
    depths_D = np.arange(1, chances_RD.shape[1] + 1)
    computed_RD = missing_R[:, None] + depths_D - 1
    gains_RD = _values(chances_RD, rate * token) - rate * offer.price.token_s * computed_RD - given_R[:, None]
    gains_RD[~can_R] = 0.0
    asking_D = rate * (offer.price.ask_s + offer.price.depth_s * depths_D)
    best = int((np.maximum(gains_RD, 0.0).sum(axis=0) - asking_D).argmax())
    rows: list[int] = []
    num_drafted, depth = 0, best + 1
    for row in np.argsort(-gains_RD[:, best], kind="stable").tolist():
        if gains_RD[row, best] <= 0 or num_drafted >= max_tokens:
            break
        rows.append(row)
        num_drafted += depth
    if not rows:
        return None, 0.0
    # What that gives, with what was guessed anyway for the others.
    is_asked_R = np.zeros(len(guessed_RD), dtype=bool)
    is_asked_R[rows] = True
    all_RD = np.zeros((len(guessed_RD), max(depth, guessed_RD.shape[1])))
    all_RD[:, : guessed_RD.shape[1]] = np.where(is_asked_R[:, None], 0.0, guessed_RD)
    all_RD[is_asked_R, :depth] = chances_RD[is_asked_R, :depth]
    drafted = np.sort(all_RD[all_RD > rate * token])[::-1][:max_tokens].tolist()
    asking_s = offer.price.seconds(depth, float(computed_RD[rows, best].sum()))
    expected = accumulate(drafted, initial=float(len(guessed_RD)))
    # As many as `plan_drafts` will take then: what a step takes is no line by its tokens.
    best_rate = max(tokens / (price.step(count) + asking_s) for count, tokens in enumerate(expected))
    return Plan(offer.method, depth, sorted(rows)), best_rate


def _values(chances_RD: Floats, cost: float) -> Floats:
    """Of the first so many places, those that are worth it: tokens beyond what they cost."""
    return np.maximum(chances_RD - cost, 0.0).cumsum(axis=1)  # they fall along a row


def _padded(chances: Seq[Seq[float]]) -> Floats:
    table_RD = np.zeros((len(chances), max(1, max((len(row) for row in chances), default=1))))
    for row, each in enumerate(chances):
        table_RD[row, : len(each)] = each
    return table_RD
