"""Costs of steps and of proposals in seconds, learned from measured times."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.timing.step_time_model import non_negative

_BUCKET = 16  # tokens; matrix products take rows in tiles of this size
_NUM_BUCKETS = 8  # larger steps count as the last bucket
_NEW = 0.05  # weight of the newest step
_FORGET = 1 / 512  # weight of forgetting in steps of another kind, so that expensive drafts are retried

_KEEP_PROPOSAL = 0.97  # weight of the past at each new proposal
_MAX_SURPRISE = 2.0  # times the expected seconds; anything above is noise


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of the next step, in seconds or in any unit proportional to them."""

    plain: float  # without drafts
    token: float  # each draft token
    num_tokens: int = 0  # of the step without drafts
    factors: Seq[float] = (1.0,)  # applied to steps with drafts; see LearnedDraftCost.factors

    def step(self, num_draft_tokens: int) -> float:
        """Return the cost of the step with these draft tokens."""
        if not num_draft_tokens:
            return self.plain
        return (self.plain + self.token * num_draft_tokens) * self.factor(num_draft_tokens)

    def factor(self, num_draft_tokens: int) -> float:
        return factor_of(self.factors, self.num_tokens + num_draft_tokens)

    def break_even(self, num_rows: int) -> float:
        """Return the chance above which one more draft token pays, where each row gets one token anyway."""
        return self.token * num_rows / self.plain


FREE = StepCost(plain=1.0, token=0.0)  # used until step times are known; drafts everything that may be accepted


class LearnedDraftCost:
    """Ratio of measured to expected step time, with and without drafts. Owned by the step thread."""

    def __init__(self) -> None:
        self._plain = self._drafting = 1.0
        self._relative = [1.0] * _NUM_BUCKETS  # ratio to the mean of steps with drafts, by bucket

    def observe(self, num_tokens: int, ratio: float, *, has_drafts: bool, num_steps: int = 1) -> None:
        """Count one step, which stands for num_steps: ratio is its measured time over the expected time."""
        ratio = min(2.0, max(0.5, ratio))
        forget = _FORGET * num_steps
        if has_drafts:
            self._drafting += _NEW * (ratio - self._drafting)
        else:
            self._plain += _NEW * (ratio - self._plain)
            self._drafting += forget * (self._plain - self._drafting)
        bucket = _bucket(num_tokens, _NUM_BUCKETS) if has_drafts else -1
        for i, mean in enumerate(self._relative):
            self._relative[i] += _NEW * (ratio / self._drafting - mean) if i == bucket else forget * (1.0 - mean)

    def factors(self) -> tuple[float, ...]:
        """Return, by bucket of step tokens, the time with drafts over the time of an equal step without.

        The mean over all steps is never below 1: planning and verification take time, and noise must not make drafts
        look free.
        """
        scale = max(1.0, self._drafting / self._plain)
        return tuple(mean * scale for mean in self._relative)


def factor_of(factors: Seq[float], num_tokens: int) -> float:
    return factors[_bucket(num_tokens, len(factors))]


def _bucket(num_tokens: int, num_buckets: int) -> int:
    return min(num_buckets, -(-num_tokens // _BUCKET)) - 1


class ProposalCost(NamedTuple):
    """Seconds that one call of a model proposer takes."""

    call_s: float
    depth_s: float  # each place of the longest draft; places follow each other
    token_s: float  # each computed token of all rows, missing ones included

    def seconds(self, depth: int, num_tokens: float) -> float:
        return self.call_s + self.depth_s * depth + self.token_s * num_tokens


class LearnedProposalCost:
    """Least-squares fit, with forgetting, of seconds ~ call + depth · D + token · T.

    Errors count relative to the expected seconds, so that one long prompt does not drown the short calls. The sums are
    plain Python: they run between two steps, when numpy's code is out of cache.
    """

    def __init__(self) -> None:
        self.cost: ProposalCost | None = None  # None before the first call
        self._num_seen = 0
        size = len(ProposalCost._fields)
        self._sums = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size

    def observe(self, depth: int, num_tokens: int, seconds: float) -> None:
        """Count one call. depth: 0 if it only caught up."""
        expected = (self.cost and self.cost.seconds(depth, num_tokens)) or seconds
        if self._num_seen > 8:
            seconds = min(seconds, _MAX_SURPRISE * expected)
        expected = max(expected, seconds / _MAX_SURPRISE)
        if expected <= 0:
            return
        features = 1.0 / expected, depth / expected, num_tokens / expected
        for i, one in enumerate(features):
            kept = zip(self._sums[i], features, strict=True)
            self._sums[i] = [_KEEP_PROPOSAL * total + one * other for total, other in kept]
            self._targets[i] = _KEEP_PROPOSAL * self._targets[i] + one * seconds / expected
        self._num_seen += 1
        if self._num_seen <= 16 or self._num_seen % 4 == 0:  # solving takes time, too
            self.cost = ProposalCost(*non_negative(np.array(self._sums), np.array(self._targets)))
