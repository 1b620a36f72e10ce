"""Virtual time: what happens next, and nothing in between."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Action]] = []

    def at(self, when: float, action: Action) -> None:
        """`when` is not in the past."""
        heapq.heappush(self._queue, (when, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
