"""What steps with drafts take beside what a line by their tokens says: products take many rows in sixteens, and the
first of one more may cost as much as ten others."""

from __future__ import annotations

from collections.abc import Sequence as Seq

_SIXTEEN = 16  # tokens
_MOST = 8  # sixteens: what is beyond counts as the last
_NEW = 0.05  # weight of a step beside those before it
_PRIOR = 4.0  # steps: so much all sixteens say of each
_KEEP = 1 - 1 / 512  # weight of what a sixteen has shown, at each other step: what seems dear is tried again
TOLD_EVERY = 4  # steps without drafts, of which one stands for all: to compare is a part of what drafts cost


class LearntDraftCost:
    """Of steps with drafts and without, what they take beside what was expected; by sixteens of tokens for those with.
    Owned by the step thread."""

    def __init__(self) -> None:
        self._plain = 1.0  # what steps without drafts take beside the line
        self._drafting = 1.0  # and those with
        self._steps = [0.0] * _MOST  # with drafts, by sixteens of tokens
        self._ratios = [0.0] * _MOST  # of these, added up

    def saw(self, num_tokens: int, ratio: float, *, has_drafts: bool) -> None:
        """A step of so many tokens has taken so much of what was expected of it. Of those without drafts one in
        TOLD_EVERY is told."""
        ratio = min(2.0, max(0.5, ratio))
        sixteen = min(_MOST, -(-num_tokens // _SIXTEEN)) - 1 if has_drafts else -1
        others = _KEEP if has_drafts else _KEEP**TOLD_EVERY
        for i in range(_MOST):
            keep = 1 - _NEW if i == sixteen else others
            self._steps[i] *= keep
            self._ratios[i] *= keep
        if has_drafts:
            self._drafting += _NEW * (ratio - self._drafting)
            self._steps[sixteen] += 1
            self._ratios[sixteen] += ratio
        else:
            self._plain += _NEW * (ratio - self._plain)

    def factors(self) -> tuple[float, ...]:
        """By sixteens of a step's tokens, of the last for all beyond: what it takes with drafts, beside a step without
        that has as many tokens. Of all steps together never less: their tokens are planned and verified one by one; and
        a device that has recorded the latter, or runs ahead with them, takes more."""
        each = zip(self._steps, self._ratios, strict=True)
        known = ((_PRIOR * self._drafting + ratios) / (_PRIOR + steps) for steps, ratios in each)
        least = max(self._plain, self._drafting) / self._drafting / self._plain
        return tuple(ratio * least for ratio in known)


def factor_of(factors: Seq[float], num_tokens: int) -> float:
    return factors[min(len(factors), -(-num_tokens // _SIXTEEN)) - 1]
