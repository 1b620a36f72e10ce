"""Where requests wait in the simulated router until replicas have room for them, as live
(router/serving/admission_queue.py): so those that come later to a replica of either pool find what waits, and whoever
leaves has little to finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from planner.simulator.clock import Clock
from planner.simulator.flight import Flight


class WaitingLine:
    """In order of arrival. Tenants, and those that may pass a request that needs much, are not simulated."""

    def __init__(self, clock: Clock, *, take: Callable[[Flight], bool], room_at: Callable[[], float]) -> None:
        """take: sends one on its way, or says that there is no room. room_at: when to ask again, though nobody has
        called `wake` until then."""
        self._clock = clock
        self._take = take
        self._room_at = room_at
        self._flights: deque[Flight] = deque()
        self._is_waking = False
        self._asks_at = -1.0

    def __len__(self) -> int:
        return len(self._flights)

    def enter(self, flight: Flight) -> None:
        self._flights.append(flight)
        if len(self._flights) == 1:
            self.wake()

    def wake(self) -> None:
        """Something may have become free."""
        if self._is_waking:
            return  # by what is sent on its way just now
        self._is_waking = True
        while self._flights and self._take(self._flights[0]):
            self._flights.popleft()
        self._is_waking = False
        if self._flights and (when := self._room_at()) > self._clock.now and self._asks_at <= self._clock.now:
            self._asks_at = when
            self._clock.at(when, self.wake)
