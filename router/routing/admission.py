"""Who goes next, and who is told at once that there is no room. Pure: the caller brings the clock.

Tenants get equal shares of the work that is admitted, and inside a tenant its users do (`fair_shares`); no priority
moves one of them before another. Among the requests of one user, the smaller priority goes first, then the earlier
arrival. Where nobody names a tenant or a user, all are one. Whoever has waited for long goes before all of these
(`ageing`).

A request is refused when it arrives, or not at all as long as the prediction holds: when the queue is full, when its
tenant or its user has their part of it, or when its turn would come too late.
"""

from __future__ import annotations

import itertools
from collections import deque

from core.types.errors import CapacityError
from router.routing.fair_shares import Line, Place, QueuedRequest, Shares

_MIN_RETRY_S = 0.5  # sooner, a client would only find the same queue
_CAUTION = 0.5  # of the time that a request has: predictions err, and when its turn has come it still has to be served
_MEASURED = 32  # admissions from which the rate is taken
_MIN_MEASURED = 4


class AdmissionQueue:
    """The requests that wait. Belongs to the event loop."""

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._all = _tenants()
        self._arrivals = itertools.count()
        self._drained = _DrainRate()

    def __len__(self) -> int:
        return self._all.num_waiting

    @property
    def num_tenants(self) -> int:
        """That it remembers."""
        return len(self._all)

    @property
    def cost(self) -> float:
        """Of all that wait, in tokens."""
        return self._all.cost

    def add(self, queued: QueuedRequest, *, within_s: float, now: float) -> None:
        """Let it wait. Raises CapacityError, with a hint when to come again, if its turn would not come within_s."""
        if self._is_full_for(queued):
            raise CapacityError(f"{len(self)} requests are waiting already", retry_after_s=self._retry_s(queued, 0.0))
        wait_s = self.wait_s(queued)
        if wait_s > _CAUTION * within_s:
            raise CapacityError(
                f"it would wait {wait_s:.1f} s for its turn, more than half of the {within_s:.1f} s that it has",
                retry_after_s=self._retry_s(queued, _CAUTION * within_s),
            )
        if not len(self):
            self._drained.begin(now)
        queued.arrival = next(self._arrivals)
        self._move(queued, Place.READY)

    def peek(self) -> QueuedRequest | None:
        """Who goes next, of those that are not set aside."""
        return self._all.first() if self._all.is_ready else None

    def pop(self, queued: QueuedRequest | None = None, *, now: float) -> QueuedRequest:
        """Admit a request; None: who goes next."""
        queued = queued or self._all.first()
        self._move(queued, Place.GONE, is_served=True)
        self._drained.add(queued.cost, now)
        self._end_if_idle(now)
        return queued

    def set_aside(self, queued: QueuedRequest) -> None:
        """Others may pass it, until it is put back. It keeps its place."""
        self._move(queued, Place.ASIDE)

    def put_back(self, queued: QueuedRequest) -> None:
        if queued.is_waiting:
            self._move(queued, Place.READY)

    def remove(self, queued: QueuedRequest, *, now: float) -> None:
        """It waits no more: its client has gone, or its time is up."""
        if queued.is_waiting:
            self._move(queued, Place.GONE)
            self._end_if_idle(now)

    def wait_s(self, queued: QueuedRequest) -> float:
        """When the turn of a request that comes now is predicted; 0 while nothing was measured."""
        per_s = self._drained.per_s
        return self._all.ahead(queued, *queued.names) / per_s if per_s else 0.0

    def _move(self, queued: QueuedRequest, to: Place, *, is_served: bool = False) -> None:
        self._all.move(queued, to, *queued.names, is_served=is_served)
        queued.place = to

    def _is_full_for(self, queued: QueuedRequest) -> bool:
        """One user leaves half of what nobody else takes to others of its tenant, one tenant a quarter to others."""
        total, limit = len(self), self._max_waiting
        of_tenant = self._all.num_waiting_of(queued.tenant)
        of_user = self._all.num_waiting_of(*queued.names)
        return total + of_user >= limit or 3 * total + of_tenant >= 3 * limit

    def _retry_s(self, queued: QueuedRequest, within_s: float) -> float:
        return max(_MIN_RETRY_S, self.wait_s(queued) - within_s)

    def _end_if_idle(self, now: float) -> None:
        """With nobody waiting, nobody has a claim from the past: forget who came."""
        if not len(self):
            self._drained.end(now)
            self._all = _tenants()


def _tenants() -> Shares:
    return Shares(lambda: Shares(Line))


class _DrainRate:
    """Work admitted per second, over the time in which somebody waited."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._busy_s = 0.0
        self._admitted: deque[tuple[float, float]] = deque(maxlen=_MEASURED)  # busy time and cost

    @property
    def per_s(self) -> float:
        """0 while too little was measured."""
        if len(self._admitted) < _MIN_MEASURED:
            return 0.0
        seconds = self._admitted[-1][0] - self._admitted[0][0]
        return sum(cost for _, cost in list(self._admitted)[1:]) / seconds if seconds > 0 else 0.0

    def begin(self, now: float) -> None:
        self._began_at = now

    def add(self, cost: float, now: float) -> None:
        self._admitted.append((self._busy_at(now), cost))

    def end(self, now: float) -> None:
        self._busy_s, self._began_at = self._busy_at(now), None

    def _busy_at(self, now: float) -> float:
        return self._busy_s + (now - self._began_at if self._began_at is not None else 0.0)
