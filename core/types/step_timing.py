"""Model of step time, and times of a prompt. The model has four numbers, learnt from steps or read from a profile:

step = base + token · T + pair · A + context · C

T  tokens computed in the step
A  pairs (token of a prompt, position it attends to): compute of attention
C  positions that decoding rows read: memory traffic of attention
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Coefficients of the step-time model, in seconds."""

    base_s: float  # of any step, for reading the weights
    token_s: float
    pair_s: float = 0.0
    context_s: float = 0.0

    def step_s(self, *, num_tokens: int, num_pairs: int, num_context: int) -> float:
        return self.base_s + self.token_s * num_tokens + self.pair_s * num_pairs + self.context_s * num_context

    def prefill_s(self, num_tokens: int, *, after: int, chunk: int) -> float:
        """Return the time for `num_tokens` of a prompt after `after` cached ones, in steps of `chunk` tokens."""
        num_steps = -(-num_tokens // chunk)
        return self.base_s * num_steps + self.token_s * num_tokens + self.pair_s * pairs(num_tokens, after=after)


@dataclass(frozen=True, kw_only=True)
class PromptSpent:
    """Breakdown of a prompt's time on one replica, in consecutive phases."""

    waited_s: float = 0.0  # from the call to the prompt's first step, or to its prefix fetch
    fetched_s: float = 0.0  # until the fetched prefix arrived
    computed_s: float = 0.0  # until the prompt's last token was computed


@dataclass(slots=True)
class PromptTimes:
    """Moments of a prompt on one replica, by time.monotonic. 0: not reached."""

    queued: float = field(default_factory=monotonic)
    turn: float = 0.0  # first step, or start of the first prefix fetch
    computing: float = 0.0  # first step

    def begin_fetch(self) -> None:
        self.turn = self.turn or monotonic()

    def begin_step(self) -> None:
        self.computing = self.computing or monotonic()
        self.turn = self.turn or self.computing

    def waited(self) -> PromptSpent:
        """Return the breakdown of a prompt that is admitted now."""
        return PromptSpent(waited_s=monotonic() - self.queued)

    def whole(self) -> PromptSpent:
        """Return the breakdown of a prompt that is complete now; of zeros if this replica computed nothing of it."""
        if not self.turn:
            return PromptSpent()
        began = self.computing or self.turn
        return PromptSpent(
            waited_s=self.turn - self.queued, fetched_s=began - self.turn, computed_s=monotonic() - began
        )


def pairs(num_tokens: int, *, after: int) -> int:
    """Return the number of positions that `num_tokens` tokens after `after` others attend to in total."""
    return num_tokens * after + num_tokens * (num_tokens + 1) // 2
