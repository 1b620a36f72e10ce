"""How fast a replica's steps follow each other, learnt from the steps themselves."""

from __future__ import annotations

import time

from cluster.words.timing import StepTiming
from engine.batch.batch import Batch
from engine.learnt_timing import LearntTiming
from engine.rate import Rate


class Pace:
    """Told of every step by the thread that makes them. What happens between two steps that follow at once, such as
    sampling, counts as part of the second."""

    def __init__(self) -> None:
        self._steps = Rate()
        self._tokens = Rate()
        self._timing = LearntTiming()
        self._begun_at: float | None = None  # the step under way, or the next one if it follows at once

    def begin(self) -> None:
        self._begun_at = self._begun_at or time.monotonic()

    def end(self, batch: Batch, *, has_prompts: bool) -> None:
        """A step with this batch is over. Without prompts, or with rows of one token each, it only decodes."""
        now = time.monotonic()
        assert self._begun_at is not None
        seconds, self._begun_at = now - self._begun_at, now
        only_decodes = not has_prompts or batch.num_tokens == len(batch.query_lens)
        self._timing.saw(batch, seconds, only_decodes=only_decodes)
        if only_decodes:
            self._steps.add(1, seconds)
        else:
            self._tokens.add(batch.num_tokens, seconds)

    def rest(self) -> None:
        """There was nothing to do."""
        self._begun_at = None

    @property
    def prompt_tokens_per_s(self) -> float:
        """Of the steps that compute prompts; 0 until there was one."""
        return self._tokens.per_s

    @property
    def decode_step_s(self) -> float:
        """Of the steps that only decode; 0 until there was one."""
        return 1 / self._steps.per_s if self._steps.per_s else 0.0

    @property
    def timing(self) -> StepTiming | None:
        """None until something was measured."""
        return self._timing.timing
