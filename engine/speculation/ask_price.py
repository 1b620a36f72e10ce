"""What it costs to ask a proposer that computes, learnt from having asked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.least_squares import non_negative

_KEEP = 0.97  # weight of the past at each new time: about the last thirty count
_MOST_SURPRISE = 2.0  # times what was expected: what else the machine does is no price of ours


class AskPrice(NamedTuple):
    """Seconds of an ask: of so many tokens for each row, one after another, and of so many that are computed."""

    ask_s: float
    depth_s: float  # each token of the longest guess: those of one row can only follow each other
    token_s: float  # each token that is computed: of all rows, with those that were missing

    def seconds(self, depth: int, num_tokens: float) -> float:
        return self.ask_s + self.depth_s * depth + self.token_s * num_tokens


class LearntAskPrice:
    """Least squares with forgetting of seconds ~ ask + depth · D + token · T. Errors count relative to what was
    expected, so that a long prompt does not drown what is asked in every step."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._sums = np.zeros((3, 3))
        self._targets = np.zeros(3)
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
        relative = np.array((1.0, depth, num_tokens)) / expected
        self._sums = self._sums * _KEEP + np.outer(relative, relative)
        self._targets = self._targets * _KEEP + relative * (seconds / expected)
        self.num_seen += 1
        self._price = AskPrice(*non_negative(self._sums, self._targets))
