"""How often a method's tokens are right, learnt from what sequences became."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.spec_decode.proposer import NUM_KINDS

_PRIOR = 4.0  # tokens: what is believed of a kind before there is anything to believe
_MEMORY = 256.0  # tokens of a kind: then the older half counts for half
_AS_EXPECTED = 1.0  # tokens of weight: that what comes is what was expected
_KEEP = 0.9
_BOUNDS = 0.05, 1.25  # of what one request is beside others: one that nobody guesses is soon left alone
# A kind that stands for a longer match is believed more: that much is known of every text.
_BELIEVED = [(1 + kind % 16) / (5 + kind % 16) for kind in range(NUM_KINDS)]


class Acceptance:
    """Of one method, over all requests: by kind, given that all tokens before were right."""

    def __init__(self, believed: Seq[float] = _BELIEVED, memory: float = _MEMORY) -> None:
        """believed: of each kind, before there is anything to believe. memory: see above."""
        self._memory = memory
        self._reached = [_PRIOR] * NUM_KINDS
        self._right = [_PRIOR * chance for chance in believed]
        self.chances = list(believed)  # by kind

    def chance(self, kind: int) -> float:
        return self.chances[kind]

    def saw(self, kinds: Seq[int], num_right: int, num_reached: int) -> None:
        """Of a proposal, so many tokens were right, and so many were looked at: one more, or all."""
        for place in range(num_reached):
            kind = kinds[place]
            self._reached[kind] += 1.0
            self._right[kind] += place < num_right
            if self._reached[kind] > self._memory:
                self._reached[kind] /= 2
                self._right[kind] /= 2
            self.chances[kind] = self._right[kind] / self._reached[kind]


class Correction:
    """What comes of some guesses beside what was expected of them: those of one method and one request, beside its
    kinds; or those that were chosen."""

    def __init__(self, bounds: tuple[float, float] = _BOUNDS, keep: float = _KEEP) -> None:
        """keep: weight of earlier guesses, at each new one."""
        self._bounds = bounds
        self._keep = keep
        self._expected = self._right = 0.0

    def saw(self, expected: float, num_right: int) -> None:
        """Of the tokens of a guess that were looked at, so many were to be right, and were."""
        self._expected = self._expected * self._keep + expected
        self._right = self._right * self._keep + num_right

    @property
    def factor(self) -> float:
        least, most = self._bounds
        return min(most, max(least, (self._right + _AS_EXPECTED) / (self._expected + _AS_EXPECTED)))
