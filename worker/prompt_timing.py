"""Timing of each prompt on this replica: queueing, prefix fetch, computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from core.types.step_timing import PromptSpent
from engine.scheduler.prompts import Prompt


@dataclass(slots=True)
class _Times:
    queued: float = field(default_factory=monotonic)
    turn: float | None = None  # first step, or start of the prefix fetch
    fetched: float | None = None


class PromptClock:
    """Clock of all prompts, owned by the step thread. Ignores unknown prompts."""

    def __init__(self) -> None:
        self._times: dict[Prompt, _Times] = {}

    def __len__(self) -> int:
        return len(self._times)

    def queued(self, prompt: Prompt) -> None:
        self._times[prompt] = _Times()

    def fetching(self, prompt: Prompt) -> None:
        """Record the start of a prefix fetch. Later calls, after a failed fetch, are ignored."""
        if (times := self._times.get(prompt)) and times.turn is None:
            times.turn = monotonic()

    def computing(self, prompts: Iterable[Prompt]) -> None:
        """Record that a step computes these prompts."""
        now = 0.0
        for prompt in prompts:
            if (times := self._times.get(prompt)) and times.fetched is None:
                now = now or monotonic()
                times.fetched = now
                times.turn = times.turn or now

    def waited_s(self, prompt: Prompt) -> float:
        """Return the seconds since an admitted prompt was queued."""
        times = self._times.get(prompt)
        return monotonic() - times.queued if times else 0.0

    def whole(self, prompt: Prompt) -> PromptSpent:
        """Return the timing of a completed prompt, and forget it."""
        times = self._times.pop(prompt, None)
        if times is None or times.turn is None:
            return PromptSpent()
        fetched = times.fetched or times.turn
        return PromptSpent(
            waited_s=times.turn - times.queued, fetched_s=fetched - times.turn, computed_s=monotonic() - fetched
        )

    def forget(self, prompt: Prompt) -> None:
        """Drop a cancelled prompt."""
        self._times.pop(prompt, None)
