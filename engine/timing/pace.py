"""Speed of a replica's steps, measured while they run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

from core.types.step_timing import StepTiming
from engine.batch.batch import Batch
from engine.spec_decode.step_cost import LearnedDraftCost
from engine.timing.rate import Rate
from engine.timing.step_time_model import StepTimeModel

# Steps without drafts in a row; one of them is compared with its expected time, which itself takes time.
_COMPARE_EVERY = 16


class StepEvent(Protocol):
    """Point in the work of the device: after everything launched before the event was created."""

    @property
    def is_past(self) -> bool: ...

    def seconds_since(self, earlier: Self, /) -> float:
        """Return the seconds between two completed events."""
        ...


class HostEvent:
    """StepEvent of a device that is synchronous with the host."""

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
    aside_s: float  # seconds before it that are not step time


class Pace:
    """Measures every step that a thread launches.

    Work between two consecutive steps, such as bookkeeping, counts as part of the second. Asynchronous steps are
    counted as soon as they are seen to be complete; no method waits for one.
    """

    def __init__(self, mark: Callable[[], StepEvent] = HostEvent) -> None:
        self._mark = mark
        self._steps = Rate()
        self._tokens = Rate()
        self._timing = StepTimeModel()
        self._draft_cost = LearnedDraftCost()
        self._num_plain = 0  # steps since the last one that was compared
        self._was_drafting = False  # in that one
        self._is_warm = False  # the first step also loads kernels and touches memory, so it is not measured
        # End of the last step, which begins the next one if that follows at once.
        self._last: StepEvent | None = None
        self._aside_s = 0.0  # since the last step
        self._launched: deque[_Step] = deque()  # not seen to be complete yet

    def begin(self) -> None:
        """Record that a step is about to be launched."""
        self._last = self._last or self._mark()

    def end(self, batch: Batch, *, has_prompts: bool, has_drafts: bool | None = None) -> None:
        """Record that a step with this batch has been launched.

        A step without prompts, or with one token per row, is a pure decode step. has_drafts: None if drafting is off.
        """
        assert self._last is not None
        begin, self._last = self._last, self._mark()
        self._launched.append(_Step(batch, has_prompts, has_drafts, begin, self._last, self._aside_s))
        self._aside_s = 0.0
        while self._launched and self._launched[0].end.is_past:
            self._count(self._launched.popleft())

    def set_aside(self, seconds: float) -> None:
        """Exclude these seconds, spent proposing draft tokens, from the time of the next step.

        They count in the step rate, but not in the cost of a token.
        """
        if self._last is not None:  # otherwise the step begins afterwards
            self._aside_s += seconds

    def rest(self) -> None:
        """Record that the engine is idle."""
        self._last = None

    def _count(self, step: _Step) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        batch, whole_s = step.batch, step.end.seconds_since(step.begin)
        seconds = max(0.0, whole_s - step.aside_s)
        only_decodes = not step.has_prompts or batch.num_tokens == len(batch.query_lens)
        if only_decodes and step.has_drafts is not None:
            self._num_plain += 1
            if step.has_drafts or self._was_drafting or self._num_plain == _COMPARE_EVERY:
                self._compare(seconds, batch, has_drafts=step.has_drafts)
                self._was_drafting, self._num_plain = step.has_drafts, 0
        self._timing.observe(batch, seconds, only_decodes=only_decodes)
        if only_decodes:
            self._steps.add(1, whole_s)
        else:
            self._tokens.add(batch.num_tokens, seconds)

    def _compare(self, seconds: float, batch: Batch, *, has_drafts: bool) -> None:
        if timing := self._timing.timing:
            num_context = int(batch.context_lens.sum())
            expected_s = timing.step_s(num_tokens=batch.num_tokens, num_pairs=0, num_context=num_context)
            if expected_s:
                self._draft_cost.observe(
                    batch.num_tokens, seconds / expected_s, has_drafts=has_drafts, num_steps=self._num_plain
                )

    @property
    def draft_factors(self) -> tuple[float, ...]:
        """See `LearnedDraftCost.factors`."""
        return self._draft_cost.factors()

    @property
    def prompt_tokens_per_s(self) -> float:
        """Token rate of steps that compute prompts; 0 before the first one."""
        return self._tokens.per_s

    @property
    def decode_step_s(self) -> float:
        """Mean seconds of pure decode steps; 0 before the first one."""
        return 1 / self._steps.per_s if self._steps.per_s else 0.0

    @property
    def timing(self) -> StepTiming | None:
        """Learned step times; None before enough steps."""
        return self._timing.timing
