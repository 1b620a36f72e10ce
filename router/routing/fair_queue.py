"""Start-time fair queueing (Goyal et al. 1996) among tenants, and among the users of each tenant. Pure.

Each flow (a tenant or a user) has a virtual time at which its next request is due. Each served request advances that
time by its cost, and the flow with the earliest time goes next. A flow that arrives or returns is due at the current
virtual time, so an idle flow saves up no credit. Virtual time advances with the work done, divided by the number of
waiting flows, as in a fluid system (Parekh and Gallager 1993). It also advances when all work goes to new flows, so a
client that invents names cannot starve another one.

Ageing. On each level (requests of a user, users of a tenant, tenants) an item has aged when the level has done 16,384
tokens of work since the item began to wait or had its last turn. The oldest aged item goes next, but aged items get at
most one token of work in seventeen, so shares hold. At most 16,384 + 18 (n + 1) C tokens of other work precede an item
before which n items wait, for a largest request of C tokens, regardless of later arrivals:
- 16,384 + C until it has aged; 17 C of other work owed for an earlier aged turn;
- 18 C for each of the n items: its turn, 16 C of other work, and the request that exceeds it.

Every operation takes logarithmic time, amortised.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import frexp
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, int]

_AGED_AFTER = 16_384.0  # tokens: about a second of prompts on a large GPU, half a minute on a small machine
_OTHER_WORK = 16  # tokens of other work for each token of an aged item
_EXACT_PRIORITIES = 32  # predictions clamp priorities to +-32


@dataclass(frozen=True, slots=True)
class Places:
    """Streams and KV blocks on decode replicas, held or free."""

    num_streams: int
    num_blocks: int

    def plus(self, other: Places) -> Places:
        return Places(self.num_streams + other.num_streams, self.num_blocks + other.num_blocks)

    def less(self, other: Places) -> Places:
        return Places(self.num_streams - other.num_streams, self.num_blocks - other.num_blocks)


NO_PLACES = Places(0, 0)


class State(Enum):
    """State of a request in the queue. ASIDE: the request waits, and others may pass it."""

    GONE = "gone"
    READY = "ready"
    ASIDE = "aside"


@dataclass(eq=False)
class QueuedRequest:
    """Request that waits for its turn, or has waited."""

    tenant: str
    priority: int  # smaller first, among the requests of its user
    cost: float  # predicted work, in tokens
    user: str = ""  # user within the tenant
    places: Places = NO_PLACES  # places counted against the tenant's share
    arrival: int = -1  # set by the queue, like `state` and `since`
    state: State = State.GONE
    since: Key = (0.0, 0)

    @property
    def is_waiting(self) -> bool:
        return self.state is not State.GONE

    @property
    def names(self) -> tuple[str, str]:
        return self.tenant, self.user

    @property
    def key(self) -> Key:
        """Sort key among the requests of the same user."""
        return self.priority, self.arrival


class FairQueue:
    """Queue of requests in fair order. A parked tenant keeps its requests here but does not compete."""

    def __init__(self) -> None:
        self._root = _Flow(levels=2)
        self._num_waiting = 0

    def __len__(self) -> int:
        """Return how many requests wait, those of parked tenants included."""
        return self._num_waiting

    @property
    def num_competing(self) -> int:
        """Requests of tenants that are not parked."""
        return self._root.num_waiting

    @property
    def cost(self) -> float:
        """Tokens of the competing requests."""
        return self._root.cost

    @property
    def num_tenants(self) -> int:
        """Number of tenants with state in the queue."""
        return len(self._root.flows)

    def move(self, queued: QueuedRequest, to: State, *, is_served: bool = False) -> None:
        """Make a request wait (READY), let others pass it (ASIDE), or remove it (GONE)."""
        self._num_waiting += (to is not State.GONE) - queued.is_waiting
        self._root.move(queued, to, queued.names, is_served=is_served)
        queued.state = to
        if not self._num_waiting:
            self._root = _Flow(levels=2)  # an empty queue drops all claims

    def pop(self, queued: QueuedRequest | None = None) -> QueuedRequest:
        """Serve a request, the first one by default."""
        queued = queued or self._root.first()
        self.move(queued, State.GONE, is_served=True)
        return queued

    def first(self) -> QueuedRequest | None:
        """Return the request whose turn it is."""
        return self._root.first() if self._root.is_ready else None

    def first_of(self, tenant: str) -> QueuedRequest | None:
        """Return the request whose turn it is among those of a tenant, parked or not."""
        flow = self._root.flows.get(tenant)
        return flow.first() if flow and flow.is_ready else None

    def park(self, tenant: str) -> None:
        """Take a tenant out of the competition."""
        self._root.park(tenant, is_parked=True)

    def unpark(self, tenant: str, *, keeps_claim: bool = False) -> None:
        """Let a tenant compete again. Without keeps_claim it is due as if it had just arrived; its age stays."""
        self._root.park(tenant, is_parked=False, keeps_claim=keeps_claim)

    def is_parked(self, tenant: str) -> bool:
        flow = self._root.flows.get(tenant)
        return flow is not None and flow.is_parked

    def num_waiting_of(self, *names: str) -> int:
        """Return how many requests of a tenant, or of a user of it, wait."""
        flow: _Flow | None = self._root
        for name in names:
            flow = flow and flow.flows.get(name)
        return flow.num_waiting if flow else 0

    def ahead(self, queued: QueuedRequest) -> float:
        """Predict the work that goes before a request that arrives now.

        While its tenant is parked, only the tenant's own requests count; otherwise all competing ones.
        """
        flow = self._root.flows.get(queued.tenant)
        return flow.ahead(queued, [queued.user]) if flow and flow.is_parked else self._root.ahead(queued, queued.names)


class _Flow:
    """Node of the queue: the root, a tenant or a user. It shares work equally among its flows; a user orders
    requests."""

    def __init__(self, *, levels: int, name: str = "", number: int = 0, due: float = 0.0) -> None:
        """levels: number of flow levels below this one. number: tie-breaker between flows due at the same time."""
        self.name = name
        self.key: Key = due, number
        self.since: Key = (0.0, 0)  # start of the wait, or last turn
        self.is_parked = False
        self._levels = levels
        self.reset()

    def reset(self) -> None:
        self.num_waiting = 0  # without parked flows, like the cost
        self.cost = 0.0
        self.flows: dict[str, _Flow] = {}
        self._order: _Order[_Flow | QueuedRequest] = _Order()
        self._idle: _Heap[_Flow] = _Heap()  # flows without a waiting request that are due in the future
        self._by_kind: dict[int, tuple[int, float]] = {}  # (number, cost) of flows by size, or of requests by priority
        self._time = 0.0  # virtual time
        self._step = 0.0  # advance of virtual time at the next request: the last request's cost / number of flows
        self._num_flows = 0  # flows ever created

    @property
    def is_ready(self) -> bool:
        return len(self._order) > 0

    def first(self) -> QueuedRequest:
        first = self._order.first()
        return first.first() if isinstance(first, _Flow) else first

    def move(self, queued: QueuedRequest, to: State, names: Sequence[str], *, is_served: bool) -> None:
        if not self._levels:
            return self._move_request(queued, to, is_served=is_served)
        flow = self.flows.get(names[0]) or self._new_flow(names[0])
        num_before, num_ready = flow.num_waiting, len(self._order)
        is_by_age = is_served and self._order.serve(flow, queued.cost)
        self._take_out(flow)
        flow.move(queued, to, names[1:], is_served=is_served)
        due, number = flow.key
        if is_served:
            # An aged flow may be due long after the others.
            self._time = max(self._time if is_by_age else due, self._time + self._step)
            self._step = queued.cost / max(1, num_ready)
            flow.key = due + queued.cost, number
        elif not num_before:
            flow.key = max(due, self._time), number
        if is_served or not num_before:
            flow.since = self._order.next_since()
        self._put(flow)
        while len(self._idle) and self._idle.first_key()[0] <= self._time:  # a flow due in the past has no debt
            del self.flows[self._idle.pop().name]

    def park(self, name: str, *, is_parked: bool, keeps_claim: bool = False) -> None:
        if (flow := self.flows.get(name)) is None or flow.is_parked == is_parked:
            return
        self._take_out(flow)
        flow.is_parked = is_parked
        if not is_parked and not keeps_claim:
            flow.key = max(flow.key[0], self._time), flow.key[1]
        self._put(flow)

    def ahead(self, queued: QueuedRequest, names: Sequence[str]) -> float:
        """Estimate the work served before the request: what is ahead in its own flow, and of each other flow at most as
        much as its own flow needs to serve it."""
        if not self._levels:
            return sum(cost for rank, (_, cost) in self._by_kind.items() if rank <= _rank(queued.priority))
        flow = self.flows.get(names[0])
        ahead = flow.ahead(queued, names[1:]) if flow else 0.0
        own = flow.cost if flow and flow.num_waiting and not flow.is_parked else None
        share, total = ahead + queued.cost, ahead
        for size, (number, cost) in self._by_kind.items():
            if own is not None and size == _size(own):
                number, cost = number - 1, cost - own
            total += max(0.0, min(cost, number * share))  # overestimates flows near the share at most twofold
        return total

    def _move_request(self, queued: QueuedRequest, to: State, *, is_served: bool) -> None:
        if is_served:
            self._order.serve(queued, queued.cost)
        self._order.discard(queued)
        if not queued.is_waiting:
            queued.since = self._order.next_since()
        if to is State.READY:
            self._order.add(queued, queued.key, queued.since)
        if sign := (to is not State.GONE) - queued.is_waiting:
            self._count(_rank(queued.priority), sign, 1, queued.cost)

    def _new_flow(self, name: str) -> _Flow:
        self._num_flows += 1
        flow = self.flows[name] = _Flow(levels=self._levels - 1, name=name, number=self._num_flows, due=self._time)
        return flow

    def _take_out(self, flow: _Flow) -> None:
        self._order.discard(flow)
        self._idle.discard(flow)
        if flow.num_waiting and not flow.is_parked:
            self._count(_size(flow.cost), -1, flow.num_waiting, flow.cost)

    def _put(self, flow: _Flow) -> None:
        if flow.num_waiting and not flow.is_parked:
            self._count(_size(flow.cost), 1, flow.num_waiting, flow.cost)
            if flow.is_ready:
                self._order.add(flow, flow.key, flow.since)
        elif not flow.num_waiting and flow.key[0] > self._time:
            flow.reset()  # no waiting requests, so no claims inside
            flow.is_parked = False
            self._idle.add(flow, flow.key)
        elif not flow.num_waiting:
            del self.flows[flow.name]

    def _count(self, kind: int, sign: int, num_waiting: int, cost: float) -> None:
        number, sum_before = self._by_kind.get(kind, (0, 0.0))
        if number + sign:
            self._by_kind[kind] = number + sign, sum_before + sign * cost
        else:
            del self._by_kind[kind]
        self.num_waiting += sign * num_waiting
        self.cost = self.cost + sign * cost if self.num_waiting else 0.0


class _Order(Generic[T]):
    """Order of the items that may go next: the oldest aged item, or the one with the smallest key."""

    def __init__(self) -> None:
        self._by_key: _Heap[T] = _Heap()
        self._by_age: _Heap[T] = _Heap()
        self._work = 0.0  # work done
        self._num_begun = 0
        self._owed = 0.0  # other work due before an item may go by age again

    def __len__(self) -> int:
        return len(self._by_key)

    def first(self) -> T:
        aged = self._owed <= 0 and self._by_age.first_key()[0] + _AGED_AFTER <= self._work
        return (self._by_age if aged else self._by_key).first()

    def next_since(self) -> Key:
        """Return the unique age key of an item that begins to wait now."""
        self._num_begun += 1
        return self._work, self._num_begun

    def add(self, item: T, key: Key, since: Key) -> None:
        self._by_key.add(item, key)
        self._by_age.add(item, since)

    def discard(self, item: T) -> None:
        self._by_key.discard(item)
        self._by_age.discard(item)

    def serve(self, item: T, cost: float) -> bool:
        """Account for a served item. Return whether it was first because of its age alone."""
        is_by_age = len(self) > 0 and self.first() is item and self._by_key.first() is not item
        self._work += cost
        self._owed = _OTHER_WORK * cost if is_by_age else max(0.0, self._owed - cost)
        return is_by_age


class _Heap(Generic[T]):
    """Heap with removal of any item. Removed entries stay until they surface or make up half of the heap."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, T]] = []
        self._live: dict[T, tuple[Key, int, T]] = {}
        self._num_added = 0  # tie-breaker, so that items are never compared

    def __len__(self) -> int:
        return len(self._live)

    def first(self) -> T:
        return self._entries[0][2]

    def first_key(self) -> Key:
        return self._entries[0][0]

    def add(self, item: T, key: Key) -> None:
        """Add an item that is not in the heap."""
        self._num_added += 1
        self._live[item] = entry = (key, self._num_added, item)
        heapq.heappush(self._entries, entry)

    def pop(self) -> T:
        item = self.first()
        self.discard(item)
        return item

    def discard(self, item: T) -> None:
        """Remove an item if it is in the heap."""
        if self._live.pop(item, None) is None:
            return
        entries, live = self._entries, self._live
        if len(entries) > 2 * len(live) + 8:
            entries[:] = live.values()
            heapq.heapify(entries)
        while entries and live.get(entries[0][2]) is not entries[0]:
            heapq.heappop(entries)


def _size(cost: float) -> int:
    """Return the cost's binary exponent, precise enough for predictions."""
    return frexp(cost)[1]


def _rank(priority: int) -> int:
    return max(-_EXACT_PRIORITIES, min(_EXACT_PRIORITIES, priority))
