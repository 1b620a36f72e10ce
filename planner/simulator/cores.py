"""Shared CPU cores: concurrent steps of replicas on one machine slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.simulator.clock import Action, Clock


@dataclass
class _Step:
    left_s: float  # remaining time if it ran alone
    width: int
    then: Action


class Cores:
    """Cores that run steps in virtual time. A step of width w uses w times the threads of the profile's replica.

    `slowdown[k - 1]` is the factor by which steps of width 1 slow down while k of them run. A step of width w counts
    as w of them, but does not slow itself down. Beyond the measured range, all steps share a constant throughput.
    """

    def __init__(self, clock: Clock, slowdown: Sequence[float]) -> None:
        self._clock = clock
        self._slowdown = list(slowdown)
        self._steps: dict[int, _Step] = {}  # running steps by number
        self._as_of = 0.0
        self._next_number = 0
        self._plan = 0  # version of the scheduled end; earlier ones are void

    def run(self, seconds: float, then: Action, *, width: int = 1) -> None:
        """Begin a step that takes `seconds` alone, and call `then` at its end."""
        self._catch_up()
        self._steps[self._next_number] = _Step(seconds, width, then)
        self._next_number += 1
        self._await_next()

    def _catch_up(self) -> None:
        """Advance all running steps to the present."""
        elapsed, total = self._clock.now - self._as_of, self._total()
        for step in self._steps.values():
            step.left_s -= elapsed / self._factor(step, total)
        self._as_of = self._clock.now

    def _await_next(self) -> None:
        self._plan += 1
        plan, total = self._plan, self._total()
        takes = {number: max(0.0, step.left_s) * self._factor(step, total) for number, step in self._steps.items()}
        number = min(takes, key=lambda number: (takes[number], number))
        self._clock.at(self._clock.now + takes[number], lambda: self._end(number, plan))

    def _end(self, number: int, plan: int) -> None:
        if plan != self._plan:
            return  # another step has begun or ended since
        self._catch_up()
        step = self._steps.pop(number)
        if self._steps:
            self._await_next()
        step.then()

    def _total(self) -> int:
        return sum(step.width for step in self._steps.values())

    def _factor(self, step: _Step, total: int) -> float:
        return self._slowed(total) / self._slowed(step.width)

    def _slowed(self, count: int) -> float:
        known = len(self._slowdown)
        return self._slowdown[count - 1] if count <= known else self._slowdown[-1] * count / known
