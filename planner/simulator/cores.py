"""Replicas that share a machine: while several step at the same time, each takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.simulator.clock import Action, Clock


@dataclass
class _Step:
    left_s: float  # that it would still take alone
    width: int
    then: Action


class Cores:
    """Runs steps under virtual time. A step of width 1 computes as the replicas of a profile do, one of width 2 with
    twice their threads. `slowdown[k - 1]` is how much longer steps of width 1 take while k of them go on; a wider one
    counts as so many, and has beside it only what is not its own.

    Beyond what was measured, more steps share what the last ones had.
    """

    def __init__(self, clock: Clock, slowdown: Sequence[float]) -> None:
        self._clock = clock
        self._slowdown = list(slowdown)
        self._steps: dict[int, _Step] = {}  # that go on, by number
        self._as_of = 0.0
        self._next_number = 0
        self._plan = 0  # how often it was worked out anew who ends next

    def run(self, seconds: float, then: Action, *, width: int = 1) -> None:
        """A step that takes so long alone begins now; `then` is called when it is over."""
        self._catch_up()
        self._steps[self._next_number] = _Step(seconds, width, then)
        self._next_number += 1
        self._await_next()

    def _catch_up(self) -> None:
        """All steps have gone on since we last looked."""
        gone, total = self._clock.now - self._as_of, self._total()
        for step in self._steps.values():
            step.left_s -= gone / self._factor(step, total)
        self._as_of = self._clock.now

    def _await_next(self) -> None:
        self._plan += 1
        plan, total = self._plan, self._total()
        takes = {number: max(0.0, step.left_s) * self._factor(step, total) for number, step in self._steps.items()}
        number = min(takes, key=lambda number: (takes[number], number))
        self._clock.at(self._clock.now + takes[number], lambda: self._end(number, plan))

    def _end(self, number: int, plan: int) -> None:
        if plan != self._plan:
            return  # somebody else has come or gone since
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
