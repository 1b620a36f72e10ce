"""What it costs to ask a proposer that computes, learnt from having asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.timing.least_squares import non_negative

_KEEP = 0.97  # weight of the past at each new time: about the last thirty count
_MOST_SURPRISE = 2.0  # times what was expected: what else the machine does is no price of ours
_SOLVE_EVERY, _FEW_SEEN = 4, 16  # asks; each of the first so many
_NUM_FEATURES = 3  # as AskPrice has numbers


class AskPrice(NamedTuple):
    """Seconds of an ask: of so many tokens for each row, one after another, and of so many that are computed."""

    ask_s: float
    depth_s: float  # each token of the longest guess: those of one row can only follow each other
    token_s: float  # each token that is computed: of all rows, with those that were missing

    def seconds(self, depth: int, num_tokens: float) -> float:
        return self.ask_s + self.depth_s * depth + self.token_s * num_tokens


class LearntAskPrice:
    """Least squares with forgetting of seconds ~ ask + depth · D + token · T. Errors count relative to what was
    expected, so that a long prompt does not drown what is asked in every step. It is told of each ask, between a step
    and the next: so it adds up without numpy, whose caches are cold, and solves now and then."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._sums = [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
        self._targets = [0.0] * _NUM_FEATURES
        self._price: AskPrice | None = None

    @property
    def price(self) -> AskPrice | None:
        """None until there was one."""
        return self._price

    def saw(self, depth: int, num_tokens: int, seconds: float) -> None:
        """depth: 0 where nothing was guessed."""
        expected = seconds
        if self._price:
            expected = self._price.seconds(depth, num_tokens) or seconds
            if self.num_seen > 8:
                seconds = min(seconds, _MOST_SURPRISE * expected)
            expected = max(expected, seconds / _MOST_SURPRISE)
        if expected <= 0:
            return
        relative = 1.0 / expected, depth / expected, num_tokens / expected
        target = seconds / expected
        for i, one in enumerate(relative):
            self._sums[i] = [_KEEP * total + one * other for total, other in zip(self._sums[i], relative, strict=True)]
            self._targets[i] = _KEEP * self._targets[i] + one * target
        self.num_seen += 1
        if self.num_seen <= _FEW_SEEN or self.num_seen % _SOLVE_EVERY == 0:
            self._price = AskPrice(*non_negative(np.array(self._sums), np.array(self._targets)))
