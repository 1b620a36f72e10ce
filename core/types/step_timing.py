"""How long a replica's steps take: four numbers, learnt from its own steps or read from a profile.

step = base + token · T + pair · A + context · C

T  tokens computed in the step
A  pairs (token of a prompt, position it attends to): what attention computes
C  positions that decoding rows read: what attention fetches
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Seconds each."""

    base_s: float  # of any step: the weights are read
    token_s: float
    pair_s: float = 0.0
    context_s: float = 0.0

    def step_s(self, *, num_tokens: int, num_pairs: int, num_context: int) -> float:
        return self.base_s + self.token_s * num_tokens + self.pair_s * num_pairs + self.context_s * num_context

    def prefill_s(self, num_tokens: int, *, after: int, chunk: int) -> float:
        """Computing `num_tokens` of a prompt behind `after` cached ones, alone, in steps of at most `chunk` tokens."""
        num_steps = -(-num_tokens // chunk)
        return self.base_s * num_steps + self.token_s * num_tokens + self.pair_s * pairs(num_tokens, after=after)


@dataclass(frozen=True, kw_only=True)
class PromptSpent:
    """Where a prompt's time went on one replica, one after the other."""

    waited_s: float = 0.0  # from its call until its first step, or until its prefix was asked for
    fetched_s: float = 0.0  # until that had come
    computed_s: float = 0.0  # until its last token was computed


def pairs(num_tokens: int, *, after: int) -> int:
    """How many positions `num_tokens` tokens behind `after` others attend to, all together."""
    return num_tokens * after + num_tokens * (num_tokens + 1) // 2
