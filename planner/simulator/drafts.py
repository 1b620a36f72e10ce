"""What a simulated replica drafts: as often right as somebody says, planned and judged by the engine's own code."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

from core.types.step_timing import StepTiming
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NOTHING, NUM_KINDS, Proposal
from engine.spec_decode.speculation import Speculation

_METHOD = "simulated"
_VOCAB_SIZE = 1 << 62  # a simulated token is any number


@dataclass(frozen=True, kw_only=True)
class DraftRates:
    """What is known of a way to draft."""

    accepted: tuple[float, ...]  # by place in a draft: how likely a token is right if all before it are
    guessed: float = 1.0  # of a row's steps, those before which there is anything to guess from
    ask_s: float = 0.0  # that asking takes, of whoever computes to guess: once for all rows of a step,
    ask_place_s: float = 0.0  # and for each place of their drafts: a pass of a smaller model, mostly

    @property
    def is_computed(self) -> bool:
        return bool(self.ask_s or self.ask_place_s)


class SimulatedDrafts:
    """Of one replica: implements engine.spec_decode.proposer.Computing, and engine.spec_decode.drafting.Prices with
    what the replica's steps take. Asking takes virtual time, which the next step has on top."""

    def __init__(self, rates: DraftRates, timing: StepTiming, *, seed: int) -> None:
        self.timing = timing
        self.draft_factors = (1.0,)
        self._rates = rates
        self._random = Random(seed)
        self._asked_s = 0.0  # in all
        self._set_aside_s = 0.0  # that no step has had on top yet
        ways = {_METHOD: self}
        self.speculation = Speculation(
            {} if rates.is_computed else ways,
            computing=ways if rates.is_computed else {},
            max_tokens=len(rates.accepted),
            vocab_size=_VOCAB_SIZE,
            may_pass_over=False,  # `guessed` says before how many of all steps there is a guess
            clock=lambda: self._asked_s,
        )

    @property
    def num_drafted(self) -> int:
        return self.speculation.counts[_METHOD].drafted.total()

    @property
    def num_accepted(self) -> int:
        return self.speculation.counts[_METHOD].accepted.total()

    def take_asked_s(self) -> float:
        """What asking has taken before the step that is about to begin."""
        seconds, self._set_aside_s = self._set_aside_s, 0.0
        return seconds

    def set_aside(self, seconds: float) -> None:
        self._set_aside_s += seconds

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        self._asked_s += self._rates.ask_s + self._rates.ask_place_s * max_tokens
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
        """Its next tokens are its last one, again and again (see `repeat_last`): so much is known of what is right."""
        if self._random.random() >= self._rates.guessed:
            return NOTHING
        chances = self._rates.accepted[:max_tokens]
        right = sequence.tokens[-1]
        num_right = next((i for i, chance in enumerate(chances) if self._random.random() >= chance), len(chances))
        tokens = [right] * num_right + [right + 1] * (len(chances) - num_right)
        return Proposal(tokens, [min(place, NUM_KINDS - 1) for place in range(len(tokens))])
