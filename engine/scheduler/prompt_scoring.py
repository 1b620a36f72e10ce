"""Requests for the log-probabilities of prompt tokens. Free of torch, so that the scheduler can use them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from core.types.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """Chunk of a scored prompt. Its first positions predict `next_tokens`, whose log-probabilities are requested."""

    row: int  # row of the step
    next_tokens: Seq[int]  # at least one
    num_top: int  # likeliest tokens reported per position


# Scores of each scored row, in order; None for a row with non-finite logits. The first call may wait for the device.
Scores = Callable[[], Seq[PromptLogprobs | None]]
