"""Virtual time: a queue of timed actions, and CPU cores on which concurrent steps slow each other down."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Action = Callable[[], None]


class Clock:
    """Clock of a simulation. Runs actions in the order of their times; ties in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Action]] = []

    def at(self, when: float, action: Action) -> None:
        """Schedule an action. `when` must not be in the past."""
        heapq.heappush(self._queue, (when, next(self._order), action))

    def run(self) -> None:
        """Run until no action is left."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()


@dataclass(eq=False)
class _Step:
    left_s: float  # remaining time if the step ran alone
    width: int
    then: Action


class Cores:
    """Cores that run steps in virtual time. A step of width w uses w times the threads of the profile's replica.

    `slowdown[k - 1]` is the factor by which steps of width 1 slow down while k of them run. A step of width w counts
    as w of them, but does not slow itself down. Beyond the measured range, all steps share a constant throughput.
    """

    def __init__(self, clock: Clock, slowdown: Sequence[float]) -> None:
        """slowdown: empty: every replica has its own device, so no step slows another down."""
        self.are_shared = bool(slowdown)
        self._clock = clock
        self._slowdown = slowdown
        self._steps: list[_Step] = []  # running steps in the order of their beginning
        self._as_of = 0.0
        self._plan = 0  # version of the scheduled end; earlier ones are void

    def run(self, seconds: float, then: Action, *, width: int) -> None:
        """Begin a step that takes `seconds` alone, and call `then` at its end."""
        if not self.are_shared:
            self._clock.at(self._clock.now + seconds, then)
            return
        self._catch_up()
        self._steps.append(_Step(seconds, width, then))
        self._await_next()

    def _catch_up(self) -> None:
        """Advance all running steps to the present."""
        elapsed = self._clock.now - self._as_of
        for step in self._steps:
            step.left_s -= elapsed / self._factor(step)
        self._as_of = self._clock.now

    def _await_next(self) -> None:
        self._plan += 1
        plan = self._plan
        takes_s, step = min(
            ((max(0.0, step.left_s) * self._factor(step), step) for step in self._steps), key=lambda one: one[0]
        )
        self._clock.at(self._clock.now + takes_s, lambda: self._end(step, plan))

    def _end(self, step: _Step, plan: int) -> None:
        if plan != self._plan:
            return  # another step has begun or ended since
        self._catch_up()
        self._steps.remove(step)
        if self._steps:
            self._await_next()
        step.then()

    def _factor(self, step: _Step) -> float:
        return self._slowed(sum(other.width for other in self._steps)) / self._slowed(step.width)

    def _slowed(self, count: int) -> float:
        known = len(self._slowdown)
        return self._slowdown[count - 1] if count <= known else self._slowdown[-1] * count / known
