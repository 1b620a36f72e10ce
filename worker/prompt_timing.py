"""Where the time of each prompt goes on this replica: until it has its turn, while its prefix comes, while it is
computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from core.types.step_timing import PromptSpent
from engine.scheduler.prompts import Prompt


@dataclass(slots=True)
class _Times:
    queued: float = field(default_factory=monotonic)
    turn: float | None = None  # its first step, or when its prefix was asked for
    fetched: float | None = None


class PromptClock:
    """Owned by the step thread. Of a prompt that it does not know it says nothing."""

    def __init__(self) -> None:
        self._times: dict[Prompt, _Times] = {}

    def __len__(self) -> int:
        return len(self._times)

    def queued(self, prompt: Prompt) -> None:
        self._times[prompt] = _Times()

    def fetching(self, prompt: Prompt) -> None:
        """Its prefix is asked for; again, where it did not come and another one may."""
        if (times := self._times.get(prompt)) and times.turn is None:
            times.turn = monotonic()

    def computing(self, prompts: Iterable[Prompt]) -> None:
        """A step has rows of these."""
        now = 0.0
        for prompt in prompts:
            if (times := self._times.get(prompt)) and times.fetched is None:
                now = now or monotonic()
                times.fetched = now
                times.turn = times.turn or now

    def waited_s(self, prompt: Prompt) -> float:
        """So far, of one that is admitted."""
        times = self._times.get(prompt)
        return monotonic() - times.queued if times else 0.0

    def whole(self, prompt: Prompt) -> PromptSpent:
        """It is computed."""
        times = self._times.pop(prompt, None)
        if times is None or times.turn is None:
            return PromptSpent()
        fetched = times.fetched or times.turn
        return PromptSpent(
            waited_s=times.turn - times.queued, fetched_s=fetched - times.turn, computed_s=monotonic() - fetched
        )

    def forget(self, prompt: Prompt) -> None:
        """Nobody waits for it any more."""
        self._times.pop(prompt, None)
