"""Prompts of whose own tokens the log-probabilities are wanted: what a step tells of them. No torch is needed to
ask."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from core.types.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A chunk of such a prompt: its first positions, and the tokens that follow them."""

    row: int  # of the step
    next_tokens: Seq[int]  # at least one
    num_top: int  # likeliest ones to tell beside each


# Of each such row, in order; None: of one whose logits are not finite. The first call may wait for the device.
Scores = Callable[[], Seq[PromptLogprobs | None]]
