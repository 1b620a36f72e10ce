"""Estimation of draft acceptance rates from the replicas' draft counters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from planner.simulator.profile import Drafts

_MIN_SAMPLES = 20  # minimum number of drafted tokens at a position
_MIN_DRAFTED = 0.01  # drafted tokens per row and step; fewer are only occasional probes
_MAX_TOKENS = 64
_HALVINGS = 30


def by_place(drafted: Sequence[float], accepted: Sequence[float], *, num_steps: float) -> Drafts | None:
    """Estimate acceptance by draft position; None if hardly anything was drafted.

    drafted, accepted: number of tokens by position. num_steps: row steps, with a draft or without.
    """
    shares: list[float] = []
    before = 1.0  # probability that all earlier tokens are accepted
    for num_drafted, num_right in zip(drafted[:_MAX_TOKENS], accepted, strict=False):
        if num_drafted < _MIN_SAMPLES or not before:
            break
        chance = num_right / num_drafted
        shares.append(min(1.0, chance / before))
        before = min(before, chance)
    if not shares or not num_steps:
        return None
    return Drafts(accepted=shares, guessed=min(1.0, drafted[0] / num_steps))


def by_yield(tokens_per_row: float, drafted_per_row: float) -> Drafts | None:
    """Estimate acceptance from mean yields, equal at every position; None without a gain or enough drafts.

    All drafts are assumed to have the mean length.
    """
    gain = tokens_per_row - 1
    if drafted_per_row < _MIN_DRAFTED or gain <= 0:
        return None
    length = min(_MAX_TOKENS, max(1, round(drafted_per_row)))
    guessed = min(1.0, drafted_per_row / length)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        is_below = guessed * sum(accumulate([share] * length, mul)) < gain
        low, high = (share, high) if is_below else (low, share)
    return Drafts(accepted=[high] * length, guessed=guessed)
