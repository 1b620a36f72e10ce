"""Fair shares among whoever waits: among tenants, and inside each among its users. Pure.

Start-time fair queueing (Goyal et al. 1996) on each level: a flow has a time at which its next request is due, which
moves on by what each of its requests costs; who is due first goes next. A flow that comes, or comes back, is due at the
level's virtual time, so that nobody saves anything up. That time moves on with the work that is done, shared by those
who wait, as it would in a fluid system (Parekh and Gallager 1993), also where all work goes to newcomers: so names that
are invented one after the other cannot keep anyone waiting for good.

Who has had much is due late, and later the more others there are. Therefore whoever waits ages, too, on each level, and
then goes before who is due: `ageing` has the bound, which is by what waits when a request comes, not by what comes
after it.

Every operation is logarithmic in how many wait; none visits them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import frexp
from typing import Protocol

from router.routing.ageing import Ageing
from router.routing.open_heap import Key, OpenHeap

_MAX_IDLE = 10_000  # flows of one level that are remembered although nobody of them waits, for what they had
_FORGOTTEN_AT_ONCE = 8  # of these, in one operation
_EXACT_PRIORITIES = 32  # beyond, those of one power of two are told apart by arrival only, in predictions


class Place(Enum):
    """Where a request is."""

    GONE = "gone"  # not here yet, or not any more
    READY = "ready"  # it waits, and may be next
    ASIDE = "aside"  # it waits, and others may pass it


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits for its turn, or has waited."""

    tenant: str
    priority: int  # smaller first, among those of its user
    cost: float  # predicted work, in tokens
    user: str = ""  # of the tenant
    arrival: int = -1  # set by the queue
    place: Place = Place.GONE  # set by the queue
    since: Key = (0.0, 0)  # when it began to wait; set by the queue

    @property
    def is_waiting(self) -> bool:
        return self.place is not Place.GONE

    @property
    def names(self) -> tuple[str, str]:
        """Whose it is, level by level."""
        return self.tenant, self.user

    def __lt__(self, other: QueuedRequest) -> bool:
        """Whether it goes before another one of its user."""
        return (self.priority, self.arrival) < (other.priority, other.arrival)


class Part(Protocol):
    """A level of the tree, or a leaf."""

    num_waiting: int
    cost: float  # of those that wait

    @property
    def is_ready(self) -> bool:
        """One of them may be next."""
        ...

    def first(self) -> QueuedRequest:
        """Who is next; only while `is_ready`."""
        ...

    def move(self, queued: QueuedRequest, to: Place, *names: str, is_served: bool = False) -> None:
        """Account for a request that goes from its place to another one."""
        ...

    def ahead(self, queued: QueuedRequest, *names: str) -> float:
        """Work that is predicted to go before a request that would come now."""
        ...


class Line:
    """One user's requests: the smaller priority first, then the earlier arrival; or who has aged."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.cost = 0.0
        self._ready: OpenHeap[QueuedRequest] = OpenHeap()
        self._ageing: Ageing[QueuedRequest] = Ageing()
        self._by_priority = _Sums()

    @property
    def is_ready(self) -> bool:
        return len(self._ready) > 0

    def first(self) -> QueuedRequest:
        return self._ageing.first() or self._ready.first()

    def move(self, queued: QueuedRequest, to: Place, *names: str, is_served: bool = False) -> None:
        if is_served:
            is_by_age = self._ageing.first() is queued and self._ready.first() is not queued
            self._ageing.count(queued.cost, is_by_age=is_by_age)
        self._ready.discard(queued)
        self._ageing.discard(queued)
        if not queued.is_waiting:
            queued.since = self._ageing.now()
        if to is Place.READY:
            self._ready.add((queued.priority, queued.arrival), queued)
            self._ageing.add(queued, queued.since)
        if more := (to is not Place.GONE) - queued.is_waiting:
            self.num_waiting += more
            self.cost = self.cost + more * queued.cost if self.num_waiting else 0.0
            self._by_priority.add(_rank(queued.priority), more, more * queued.cost)

    def ahead(self, queued: QueuedRequest, *names: str) -> float:
        rank = _rank(queued.priority)
        return sum(cost for other, (_, cost) in self._by_priority.items() if other <= rank)


class Shares:
    """Flows with equal shares of the work that is taken."""

    def __init__(self, make_part: Callable[[], Part]) -> None:
        self.num_waiting = 0
        self.cost = 0.0
        self._make_part = make_part
        self._flows: dict[str, _Flow] = {}
        self._ready: OpenHeap[_Flow] = OpenHeap()  # those of which one may be next
        self._ageing: Ageing[_Flow] = Ageing()  # the same ones
        self._idle: OpenHeap[_Flow] = OpenHeap()  # those of which nobody waits, and that had more than their share
        self._by_cost = _Sums()  # of flows, by the power of two of what waits of them
        self._time = 0.0  # virtual
        self._step = 0.0  # by which it moves with the next request: what the last one took of each flow's time
        self._num_flows = 0  # that there have been

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    @property
    def is_ready(self) -> bool:
        return len(self._ready) > 0

    def first(self) -> QueuedRequest:
        return (self._ageing.first() or self._ready.first()).part.first()

    def num_waiting_of(self, name: str, *names: str) -> int:
        flow = self._flows.get(name)
        if flow is None:
            return 0
        return flow.part.num_waiting_of(*names) if names and isinstance(flow.part, Shares) else flow.part.num_waiting

    def move(self, queued: QueuedRequest, to: Place, *names: str, is_served: bool = False) -> None:
        flow = self._flows.get(names[0]) or self._new_flow(names[0])
        part, num_ready = flow.part, len(self._ready)
        is_by_age = is_served and self._ageing.first() is flow and self._ready.first() is not flow
        (self._ready if part.is_ready else self._idle).discard(flow)
        self._ageing.discard(flow)
        before = part.num_waiting, part.cost
        part.move(queued, to, *names[1:], is_served=is_served)
        self._count(before, (part.num_waiting, part.cost))
        if is_served:
            self._ageing.count(queued.cost, is_by_age=is_by_age)
            # When somebody who has aged is due says nothing of the others.
            self._time = max(self._time if is_by_age else flow.due, self._time + self._step)
            self._step = queued.cost / max(1, num_ready)
            flow.due += queued.cost
        elif not before[0]:
            flow.due = max(flow.due, self._time)
        if is_served or not before[0]:
            flow.since = self._ageing.now()
        self._put(flow)
        self._forget_some()

    def ahead(self, queued: QueuedRequest, *names: str) -> float:
        """Those of its own flow that go before it, and of each other flow as much as waits there, but no more than the
        share that its own gets meanwhile."""
        flow = self._flows.get(names[0])
        ahead = flow.part.ahead(queued, *names[1:]) if flow else 0.0
        own = flow.part.cost if flow and flow.part.num_waiting else None
        return ahead + self._within(ahead + queued.cost, without=own)

    def _within(self, share: float, *, without: float | None) -> float:
        """The sum over flows, but for one, of what waits of each, up to `share`; at most a factor of two too much for
        those near to it."""
        total = 0.0
        left_out = None if without is None else _power(without)
        for power, (number, cost) in self._by_cost.items():
            if power == left_out and without is not None:
                number, cost = number - 1, cost - without
            total += max(0.0, min(cost, number * share))
        return total

    def _new_flow(self, name: str) -> _Flow:
        self._num_flows += 1
        flow = self._flows[name] = _Flow(name, self._num_flows, self._time, self._make_part())
        return flow

    def _count(self, before: tuple[int, float], after: tuple[int, float]) -> None:
        for sign, (number, cost) in ((-1, before), (1, after)):
            if number:
                self._by_cost.add(_power(cost), sign, sign * cost)
        self.num_waiting += after[0] - before[0]
        self.cost = self.cost + after[1] - before[1] if self.num_waiting else 0.0

    def _put(self, flow: _Flow) -> None:
        """Where a flow belongs by what it has."""
        if flow.part.is_ready:
            self._ready.add(flow.key, flow)
            self._ageing.add(flow, flow.since)
        elif flow.part.num_waiting:
            return  # all aside
        elif flow.due > self._time:
            flow.part = self._make_part()  # with nobody of it waiting, nobody in it has a claim from the past
            self._idle.add(flow.key, flow)
        else:
            del self._flows[flow.name]

    def _forget_some(self) -> None:
        """Flows whose share has caught up with what they had; and those that are nearest to it, where they are many."""
        for _ in range(min(_FORGOTTEN_AT_ONCE, len(self._idle))):
            flow = self._idle.first()
            if flow.due > self._time and len(self._idle) <= _MAX_IDLE:
                return
            self._idle.discard(flow)
            del self._flows[flow.name]


@dataclass(eq=False)
class _Flow:
    name: str
    number: int  # decides between two that are due at the same time
    due: float  # virtual time
    part: Part
    since: Key = (0.0, 0)  # when it began to wait, or had its last turn

    @property
    def key(self) -> Key:
        return self.due, self.number


class _Sums(dict[int, tuple[int, float]]):
    """How many, and how much, of each kind."""

    def add(self, kind: int, number: int, amount: float) -> None:
        before, sum_before = self.get(kind, (0, 0.0))
        if before + number:
            self[kind] = before + number, sum_before + amount
        else:
            del self[kind]


def _power(cost: float) -> int:
    return frexp(cost)[1]


def _rank(priority: int) -> int:
    """Of few values, in the order of priorities."""
    size = abs(priority)
    if size > _EXACT_PRIORITIES:
        size = _EXACT_PRIORITIES + size.bit_length()
    return size if priority >= 0 else -size
