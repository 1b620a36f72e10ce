"""How fast a replica's steps follow each other, learnt from the steps themselves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

from core.types.step_timing import StepTiming
from engine.batch.batch import Batch
from engine.spec_decode.step_cost import SAMPLE_EVERY, LearnedDraftCost
from engine.timing.rate import Rate
from engine.timing.step_time_model import StepTimeModel


class StepEvent(Protocol):
    """A moment in the work of whoever computes steps: behind all that was launched before it was made."""

    @property
    def is_past(self) -> bool: ...

    def seconds_since(self, earlier: Self, /) -> float:
        """Of two that are past."""
        ...


class HostEvent:
    """Implements StepMark, where what was launched is done."""

    is_past = True

    def __init__(self) -> None:
        self._at = time.monotonic()

    def seconds_since(self, earlier: HostEvent) -> float:
        return self._at - earlier._at


class _Step(NamedTuple):
    batch: Batch
    has_prompts: bool
    has_drafts: bool | None
    begin: StepEvent
    end: StepEvent
    aside_s: float  # before it, for something else than what steps take


class Pace:
    """Told of every step by the thread that launches them. What happens between two steps that follow at once, such as
    booking, counts as part of the second. Where steps are computed while the host goes on, a step counts as soon as it
    is seen to be over; nothing here waits for that."""

    def __init__(self, mark: Callable[[], StepEvent] = HostEvent) -> None:
        self._mark = mark
        self._steps = Rate()
        self._tokens = Rate()
        self._timing = StepTimeModel()
        self._draft_cost = LearnedDraftCost()
        self._num_plain = 0  # steps without drafts
        self._last: StepEvent | None = None  # the end of the last step; the begin of the next one if it follows at once
        self._aside_s = 0.0  # since the last step
        self._launched: deque[_Step] = deque()  # those that have not been seen to be over

    def begin(self) -> None:
        """A step is about to be launched."""
        self._last = self._last or self._mark()

    def end(self, batch: Batch, *, has_prompts: bool, has_drafts: bool | None = None) -> None:
        """A step with this batch has been launched. Without prompts, or with rows of one token each, it only
        decodes. has_drafts: None where none ever has, and nobody wants to know what they take."""
        assert self._last is not None
        begin, self._last = self._last, self._mark()
        self._launched.append(_Step(batch, has_prompts, has_drafts, begin, self._last, self._aside_s))
        self._aside_s = 0.0
        while self._launched and self._launched[0].end.is_past:
            self._count(self._launched.popleft())

    def set_aside(self, seconds: float) -> None:
        """So long the next step has waited for what is no part of it: guesses of its tokens. It is part of how fast
        steps follow each other, and not of what a token more costs."""
        if self._last is not None:  # else the step begins after that
            self._aside_s += seconds

    def rest(self) -> None:
        """There was nothing to do."""
        self._last = None

    def _count(self, step: _Step) -> None:
        batch, whole_s = step.batch, step.end.seconds_since(step.begin)
        seconds = max(0.0, whole_s - step.aside_s)
        only_decodes = not step.has_prompts or batch.num_tokens == len(batch.query_lens)
        if only_decodes and step.has_drafts is not None:
            self._num_plain += not step.has_drafts
            if step.has_drafts or self._num_plain % SAMPLE_EVERY == 0:
                self._compare(seconds, batch, has_drafts=step.has_drafts)
        self._timing.saw(batch, seconds, only_decodes=only_decodes)
        if only_decodes:
            self._steps.add(1, whole_s)
        else:
            self._tokens.add(batch.num_tokens, seconds)

    def _compare(self, seconds: float, batch: Batch, *, has_drafts: bool) -> None:
        if timing := self._timing.timing:
            num_context = int(batch.context_lens.sum())
            expected_s = timing.step_s(num_tokens=batch.num_tokens, num_pairs=0, num_context=num_context)
            if expected_s:
                self._draft_cost.saw(batch.num_tokens, seconds / expected_s, has_drafts=has_drafts)

    @property
    def draft_factors(self) -> tuple[float, ...]:
        """See `LearnedDraftCost.factors`."""
        return self._draft_cost.factors()

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
