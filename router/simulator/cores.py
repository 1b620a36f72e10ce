"""Replicas that share a machine: while several step at the same time, each takes longer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.simulator.clock import Action, Clock


class Cores:
    """Runs steps under virtual time. `slowdown[k - 1]` is how much longer steps take while k of them go on.

    Beyond what was measured, more steps share what the last ones had.
    """

    def __init__(self, clock: Clock, slowdown: Sequence[float]) -> None:
        self._clock = clock
        self._slowdown = list(slowdown)
        self._left: dict[int, float] = {}  # of each step, by number: seconds that it would still take alone
        self._actions: dict[int, Action] = {}
        self._as_of = 0.0
        self._next_number = 0
        self._plan = 0  # how often it was worked out anew who ends next

    def run(self, seconds: float, then: Action) -> None:
        """A step that takes so long alone begins now; `then` is called when it is over."""
        self._catch_up()
        self._left[self._next_number] = seconds
        self._actions[self._next_number] = then
        self._next_number += 1
        self._await_next()

    def _catch_up(self) -> None:
        """All steps have gone on since we last looked."""
        gone = (self._clock.now - self._as_of) / self._factor()
        self._left = {number: left - gone for number, left in self._left.items()}
        self._as_of = self._clock.now

    def _await_next(self) -> None:
        self._plan += 1
        plan = self._plan
        number, left = min(self._left.items(), key=lambda item: (item[1], item[0]))
        self._clock.at(self._clock.now + max(0.0, left) * self._factor(), lambda: self._end(number, plan))

    def _end(self, number: int, plan: int) -> None:
        if plan != self._plan:
            return  # somebody else has come or gone since
        self._catch_up()
        del self._left[number]
        if self._left:
            self._await_next()
        self._actions.pop(number)()

    def _factor(self) -> float:
        count, known = len(self._left), len(self._slowdown)
        if not count:
            return math.inf  # nothing goes on
        return self._slowdown[count - 1] if count <= known else self._slowdown[-1] * count / known
