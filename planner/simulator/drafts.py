"""Speculative decoding: simulated drafts at given rates, their calculated yield, and rates estimated from real drafts.

The real engine plans and verifies simulated drafts; only proposals and acceptance are drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from random import Random

from core.types.step_timing import StepTiming
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NO_PROPOSAL, NUM_KINDS, Proposal
from engine.spec_decode.speculation import Speculation
from planner.simulator.profile import MAX_DRAFT_TOKENS, Drafts

_METHOD = "simulated"
_VOCAB_SIZE = 1 << 62  # a simulated token is any number
_MIN_SAMPLES = 20  # minimum number of drafted tokens at a position
_MIN_DRAFTED = 0.01  # drafted tokens per row and step; fewer are only occasional probes
_HALVINGS = 30


class SimulatedDrafts:
    """Proposer and step times of one simulated replica (ModelProposer and StepTimes of engine.spec_decode).

    Proposer calls take virtual time, which is added to the next step.
    """

    def __init__(self, rates: Drafts, timing: StepTiming, *, seed: int) -> None:
        self.timing = timing
        self.draft_factors = (1.0,)
        self._rates = rates
        self._random = Random(seed)
        self._call_s = 0.0  # total time of proposer calls
        self._pending_s = 0.0  # part not yet added to a step
        methods = {_METHOD: self}
        self.speculation = Speculation(
            {} if rates.is_computed else methods,
            models=methods if rates.is_computed else {},
            max_tokens=len(rates.accepted),
            vocab_size=_VOCAB_SIZE,
            backs_off=False,  # `guessed` already is a share of all steps
            clock=lambda: self._call_s,
        )

    @property
    def num_drafted(self) -> int:
        return self.speculation.counts[_METHOD].drafted.total()

    @property
    def num_accepted(self) -> int:
        return self.speculation.counts[_METHOD].accepted.total()

    def take_call_s(self) -> float:
        """Return and reset the time of proposer calls before the next step."""
        seconds, self._pending_s = self._pending_s, 0.0
        return seconds

    def set_aside(self, seconds: float) -> None:
        self._pending_s += seconds

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        self._call_s += self._rates.ask_s + self._rates.ask_place_s * max_tokens
        return [self._propose(sequence, max_tokens) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        pass

    def num_behind(self, sequence: Sequence) -> int:
        return 0

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def rest(self, num_first: int | None) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def _propose(self, sequence: Sequence, max_tokens: int) -> Proposal:
        """Propose a draft at random by the rates. Correct tokens equal the last one, which is what is sampled again."""
        if self._random.random() >= self._rates.guessed:
            return NO_PROPOSAL
        chances = self._rates.accepted[:max_tokens]
        right = sequence.tokens[-1]
        num_right = next((i for i, chance in enumerate(chances) if self._random.random() >= chance), len(chances))
        tokens = [right] * num_right + [right + 1] * (len(chances) - num_right)
        return Proposal(tokens, [min(place, NUM_KINDS - 1) for place in range(len(tokens))])


@dataclass(frozen=True, kw_only=True)
class DraftLine:
    """Calculated rates of steps with num_rows rows, where each row with a proposal has a draft of `length` tokens."""

    num_rows: int
    length: int  # 0: no drafts
    tokens_per_row: float  # tokens per row and step
    step_s: float  # including the calls of a draft model
    floor: float  # acceptance probability above which one more draft token pays

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.tokens_per_row / self.step_s


def draft_table(timing: StepTiming, rates: Drafts, num_rows: int, *, context: int) -> list[DraftLine]:
    """Return one line per draft length from 0 on. context: tokens per row."""
    plain_s = timing.step_s(num_tokens=num_rows, num_pairs=0, num_context=num_rows * context)
    expected = [0.0, *accumulate(accumulate(rates.accepted, mul))]  # expected accepted tokens by draft length
    return [
        DraftLine(
            num_rows=num_rows,
            length=length,
            tokens_per_row=1 + rates.guessed * right,
            step_s=plain_s
            + timing.token_s * num_rows * rates.guessed * length
            + (rates.ask_s + rates.ask_place_s * length if length else 0.0),
            floor=timing.token_s * num_rows / plain_s,
        )
        for length, right in enumerate(expected)
    ]


def by_place(drafted: Seq[float], accepted: Seq[float], *, num_steps: float) -> Drafts | None:
    """Estimate acceptance by draft position; None if hardly anything was drafted.

    drafted, accepted: number of tokens by position. num_steps: row steps, with a draft or without.
    """
    shares: list[float] = []
    before = 1.0  # probability that all earlier tokens are accepted
    for num_drafted, num_right in zip(drafted[:MAX_DRAFT_TOKENS], accepted, strict=False):
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
    length = min(MAX_DRAFT_TOKENS, max(1, round(drafted_per_row)))
    guessed = min(1.0, drafted_per_row / length)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        is_below = guessed * sum(accumulate([share] * length, mul)) < gain
        low, high = (share, high) if is_below else (low, share)
    return Drafts(accepted=[high] * length, guessed=guessed)
