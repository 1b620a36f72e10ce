"""From what replicas have drafted to how often the tokens of a draft are right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from planner.simulator.profile import Drafts

_FEWEST = 20  # drafted tokens at a place, for its share to mean anything
_LEAST = 0.01  # drafted tokens for each row of a step: less is a trial now and then
_MAX_TOKENS = 64
_HALVINGS = 30


def by_place(drafted: Sequence[float], accepted: Sequence[float], *, num_steps: float) -> Drafts | None:
    """drafted, accepted: tokens, by their place in a draft. num_steps: of all rows, with a draft and without. None:
    nothing to speak of was drafted."""
    shares: list[float] = []
    before = 1.0  # the chance that all tokens before are right
    for num_drafted, num_right in zip(drafted[:_MAX_TOKENS], accepted, strict=False):
        if num_drafted < _FEWEST or not before:
            break
        chance = num_right / num_drafted
        shares.append(min(1.0, chance / before))
        before = min(before, chance)
    if not shares or not num_steps:
        return None
    return Drafts(accepted=shares, guessed=min(1.0, drafted[0] / num_steps))


def by_yield(tokens_per_row: float, drafted_per_row: float) -> Drafts | None:
    """As if every token of a draft were as likely to be right, and every step of a row had one of that length. None:
    nothing to speak of is drafted."""
    gain = tokens_per_row - 1
    if drafted_per_row < _LEAST or gain <= 0:
        return None
    length = min(_MAX_TOKENS, max(1, round(drafted_per_row)))
    guessed = min(1.0, drafted_per_row / length)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        is_below = guessed * sum(accumulate([share] * length, mul)) < gain
        low, high = (share, high) if is_below else (low, share)
    return Drafts(accepted=[high] * length, guessed=guessed)
