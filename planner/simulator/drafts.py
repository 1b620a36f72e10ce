"""Speculative decoding of a simulated replica: acceptance by given rates, planned and verified by the real engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

from core.types.step_timing import StepTiming
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NO_PROPOSAL, NUM_KINDS, Proposal
from engine.spec_decode.speculation import Speculation

_METHOD = "simulated"
_VOCAB_SIZE = 1 << 62  # a simulated token is any number


@dataclass(frozen=True, kw_only=True)
class DraftRates:
    """Acceptance rates and costs of a draft method."""

    accepted: tuple[float, ...]  # by draft position: probability of acceptance if all earlier tokens are accepted
    guessed: float = 1.0  # share of a row's steps that have a proposal
    ask_s: float = 0.0  # fixed cost of a proposer call per step; 0 for lookup methods
    ask_place_s: float = 0.0  # cost per draft position, usually one pass of a smaller model

    @property
    def is_computed(self) -> bool:
        return bool(self.ask_s or self.ask_place_s)


class SimulatedDrafts:
    """Proposer and step times of one simulated replica (ModelProposer and StepTimes of engine.spec_decode).

    Proposer calls take virtual time, which is added to the next step.
    """

    def __init__(self, rates: DraftRates, timing: StepTiming, *, seed: int) -> None:
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
        """Propose a draft at random by the rates. Correct tokens equal the last one (see `repeat_last`)."""
        if self._random.random() >= self._rates.guessed:
            return NO_PROPOSAL
        chances = self._rates.accepted[:max_tokens]
        right = sequence.tokens[-1]
        num_right = next((i for i, chance in enumerate(chances) if self._random.random() >= chance), len(chances))
        tokens = [right] * num_right + [right + 1] * (len(chances) - num_right)
        return Proposal(tokens, [min(place, NUM_KINDS - 1) for place in range(len(tokens))])
