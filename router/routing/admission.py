"""Who goes next, and who is told at once that there is no room. Pure: the caller brings the clock.

Among tenants, each gets an equal share of the work that is admitted (start-time fair queueing, Goyal et al. 1996); no
priority moves one tenant before another. Among the requests of one tenant, the smaller priority goes first, then the
earlier arrival. Where nobody names a tenant, all are one.

A request is refused when it arrives, or not at all as long as the prediction holds: when the queue is full, when its
tenant has its part of it, or when its turn would come too late.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from cluster.words.errors import CapacityError

_MIN_RETRY_S = 0.5  # sooner, a client would only find the same queue
_CAUTION = 0.5  # of the time that a request has: predictions err, and when its turn has come it still has to be served
_MEASURED = 32  # admissions from which the rate is taken
_MIN_MEASURED = 4


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits for its turn, or has waited."""

    tenant: str
    priority: int  # smaller first, among its tenant's
    cost: float  # predicted work, in tokens
    arrival: int = -1  # set by the queue
    is_waiting: bool = False  # set by the queue

    def __lt__(self, other: QueuedRequest) -> bool:
        """Whether it goes before another one of its tenant."""
        return (self.priority, self.arrival) < (other.priority, other.arrival)


@dataclass
class _Tenant:
    due: float  # virtual time at which its next request is due
    waiting: list[QueuedRequest] = field(default_factory=list)  # a heap; those that have gone away are passed over
    num_waiting: int = 0
    cost: float = 0.0  # of those that wait


class AdmissionQueue:
    """The requests that wait. Belongs to the event loop."""

    def __init__(self, *, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._tenants: dict[str, _Tenant] = {}
        self._virtual_time = 0.0
        self._arrivals = itertools.count()
        self._num_waiting = 0
        self._drained = _DrainRate()

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, queued: QueuedRequest, *, within_s: float, now: float) -> None:
        """Let it wait. Raises CapacityError, with a hint when to come again, if its turn would not come within_s."""
        known = self._tenants.get(queued.tenant)
        if self._num_waiting + (known.num_waiting if known else 0) >= self._max_waiting:
            raise CapacityError(
                f"{self._num_waiting} requests are waiting already", retry_after_s=self._retry_s(queued, 0.0)
            )
        wait_s = self.wait_s(queued)
        if wait_s > _CAUTION * within_s:
            raise CapacityError(
                f"it would wait {wait_s:.1f} s for its turn, and has {within_s:.1f} s",
                retry_after_s=self._retry_s(queued, _CAUTION * within_s),
            )
        tenant = self._tenants.setdefault(queued.tenant, _Tenant(due=self._virtual_time))
        if not self._num_waiting:
            self._drained.begin(now)
        if not tenant.num_waiting:
            tenant.due = max(tenant.due, self._virtual_time)
        queued.arrival, queued.is_waiting = next(self._arrivals), True
        heapq.heappush(tenant.waiting, queued)
        self._count(tenant, 1, queued.cost)

    def peek(self) -> QueuedRequest | None:
        """Who goes next."""
        tenant = self._next_tenant()
        return self._head(tenant) if tenant else None

    def pop(self, *, now: float) -> QueuedRequest:
        """Admit who goes next."""
        tenant = self._next_tenant()
        assert tenant, "nobody waits"
        queued = self._head(tenant)
        heapq.heappop(tenant.waiting)
        queued.is_waiting = False
        self._count(tenant, -1, -queued.cost)
        self._virtual_time = max(self._virtual_time, tenant.due)
        tenant.due += queued.cost
        self._drained.add(queued.cost, now)
        self._end_if_idle(now)
        return queued

    def remove(self, queued: QueuedRequest, *, now: float) -> None:
        """It waits no more: its client has gone, or its time is up."""
        if queued.is_waiting:
            queued.is_waiting = False
            self._count(self._tenants[queued.tenant], -1, -queued.cost)
            self._end_if_idle(now)

    def wait_s(self, queued: QueuedRequest) -> float:
        """When the turn of a request that comes now is predicted; 0 while nothing was measured.

        Before it go those of its own tenant that are not behind it, and of each other tenant as much as it has, but no
        more than the share that this tenant gets meanwhile.
        """
        if not self._drained.per_s:
            return 0.0
        own = self._tenants.get(queued.tenant)
        waiting = [other for other in (own.waiting if own else []) if other.is_waiting]
        ahead = sum(other.cost for other in waiting if other.priority <= queued.priority)
        share = ahead + queued.cost
        others = sum(min(tenant.cost, share) for name, tenant in self._tenants.items() if name != queued.tenant)
        return (ahead + others) / self._drained.per_s

    def _retry_s(self, queued: QueuedRequest, within_s: float) -> float:
        return max(_MIN_RETRY_S, self.wait_s(queued) - within_s)

    def _next_tenant(self) -> _Tenant | None:
        waiting = (tenant for tenant in self._tenants.values() if tenant.num_waiting)
        return min(waiting, key=lambda tenant: tenant.due, default=None)

    def _head(self, tenant: _Tenant) -> QueuedRequest:
        while not tenant.waiting[0].is_waiting:
            heapq.heappop(tenant.waiting)
        return tenant.waiting[0]

    def _count(self, tenant: _Tenant, number: int, cost: float) -> None:
        tenant.num_waiting += number
        tenant.cost += cost
        self._num_waiting += number

    def _end_if_idle(self, now: float) -> None:
        """With nobody waiting, nobody has a claim from the past: forget who came."""
        if not self._num_waiting:
            self._drained.end(now)
            self._tenants.clear()
            self._virtual_time = 0.0


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
