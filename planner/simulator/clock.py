"""Virtual time: a queue of timed actions."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

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
