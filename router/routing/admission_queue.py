"""Order of the requests that wait for replicas, live and in the simulator. Pure: the caller passes the time; live
requests await their turn in router/serving/admission_waits.py.

Order: fair shares among tenants and among the users of a tenant (`fair_queue`), then the smaller priority, then the
earlier arrival. A priority orders only the requests of one user.

Share. While there are several tenants, a tenant may hold at most `share` of the decode capacity that the other tenants
leave free, like the dynamic buffer thresholds of Choudhury and Hahne (1998). With a share of three quarters, a single
tenant leaves a quarter free, and k saturating tenants leave one part in 1 + 3k. So the next tenant need not wait for an
answer to end. A tenant whose first request would exceed the share is parked: its requests stay in the queue, but they
neither block other tenants nor count in predicted waits.

Room. A request that finds no room blocks all requests behind it for `hold_s`. For the next `hold_s`, requests that fit
may pass it, and so on in turns. So a large request gets room, and delays others for a bounded time. The same rule
applies within a tenant to a request over its tenant's share.

Offline requests (priority OFFLINE) are considered only while no online request competes, and block no other request.

Rejection. A request is rejected only on arrival: if the queue is full, if its tenant or user already fills its part of
the queue, or if its turn would come too late. Later it can only time out, if its predicted wait was too short.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping

from core.types.errors import CapacityError
from core.types.request import OFFLINE
from router.routing.fair_queue import NO_PLACES, FairQueue, Places, QueuedRequest, State

_HOLD_S = 2.0
_MAX_PASSES = 4  # maximum number of requests passed over per run; each costs a routing decision
_MIN_RETRY_S = 0.5  # an earlier retry would find the same queue
_CAUTION = 0.5  # fraction of a request's time limit that it may spend waiting: predictions err, and serving takes time
_MEASURED = 32  # admissions over which a rate is averaged
_MIN_MEASURED = 4

Take = Callable[[QueuedRequest], bool]


class AdmissionQueue:
    """Queue of waiting requests, with the places that each tenant holds."""

    def __init__(
        self,
        *,
        max_waiting: int,
        hold_s: float = _HOLD_S,
        share: Callable[[], float] = lambda: 1.0,
        free: Callable[[], Places] = lambda: NO_PLACES,
    ) -> None:
        """share: returns the maximum part that a tenant holds of the decode capacity that the other tenants leave free;
        1 disables the limit. free: returns the free places of all replicas."""
        self._max_waiting = max_waiting
        self._hold_s = hold_s
        self._share = share
        self._free_at_replicas = free
        self._free: Places | None = None  # free places left during a run; None: not queried yet
        self._held: dict[str, Places] = {}
        self._online, self._offline = FairQueue(), FairQueue()
        self._tenants: dict[str, _Tenant] = {}  # tenants with waiting online requests
        self._turns = _Turns(hold_s)
        self._rate = _DrainRate()
        self._arrivals = itertools.count()
        self._is_running = False

    def __len__(self) -> int:
        """Return how many online requests wait."""
        return len(self._online)

    @property
    def num_at_share(self) -> int:
        """Number of tenants that wait because they have reached their share."""
        return sum(map(self._online.is_parked, self._tenants))

    @property
    def held(self) -> Mapping[str, Places]:
        """Places held by the admitted requests of each tenant, until their release."""
        return self._held

    @property
    def is_blocked(self) -> bool:
        """True while a request that found no room blocks others."""
        return self._turns.is_on

    def is_at_share(self, tenant: str) -> bool:
        return self._online.is_parked(tenant)

    def add(self, queued: QueuedRequest, *, within_s: float, now: float) -> None:
        """Add a request to the queue.

        Raises CapacityError, with a retry hint, if the queue is full or the turn of an online request is predicted too
        late for within_s.
        """
        queue = self._queue_of(queued)
        if self._is_full_for(queued):
            raise CapacityError(f"{len(queue)} requests are waiting already", retry_after_s=self._retry_s(queued, 0.0))
        if queue is self._online and (wait_s := self.wait_s(queued)) > _CAUTION * within_s:
            raise CapacityError(
                f"it would wait {wait_s:.1f} s for its turn, more than half of the {within_s:.1f} s that it has",
                retry_after_s=self._retry_s(queued, _CAUTION * within_s),
            )
        queued.arrival = next(self._arrivals)
        queue.move(queued, State.READY)
        if queue is self._online and queued.tenant not in self._tenants:
            self._tenants[queued.tenant] = _Tenant(self._hold_s)
        self._note_busy(queued.tenant, now)

    def remove(self, queued: QueuedRequest, *, now: float) -> None:
        """Remove a request whose client has left or whose time is up. No-op unless it waits."""
        if queued.is_waiting:
            self._queue_of(queued).move(queued, State.GONE)
            self._has_left(queued, now)

    def run(self, take: Take, *, now: float) -> None:
        """Call `take` with each request whose turn has come. It returns whether it found room for the request.

        `take` may also remove the request, and add or release others.
        """
        if self._is_running:
            return
        self._is_running, self._free = True, None
        try:
            self._run_online(take, now)
            self._run_offline(take, now)
        finally:
            self._is_running, self._free = False, None

    def release(self, queued: QueuedRequest) -> None:
        """Give the places of an admitted request back to its tenant's share."""
        self._hold(queued.tenant, self._held.get(queued.tenant, NO_PLACES).less(queued.places))

    def wait_s(self, queued: QueuedRequest) -> float:
        """Predict the wait of a request that arrives now, in seconds; 0 before any rate is measured."""
        is_parked = self._online.is_parked(queued.tenant)
        per_s = self._tenants[queued.tenant].rate.per_s if is_parked else self._rate.per_s
        return self._online.ahead(queued) / per_s if per_s else 0.0

    def changes_at(self) -> float | None:
        """Return the time at which a turn ends, so that `run` is due even without new room; None without a turn."""
        turns = [self._turns, *(tenant.turns for tenant in self._tenants.values())]
        return min((one.end_at for one in turns if one.is_on), default=None)

    def _run_online(self, take: Take, now: float) -> None:
        online, turns = self._online, self._turns
        for each in (turns, *(tenant.turns for tenant in self._tenants.values())):
            if each.advance(now):
                self._put_back(each)
        for name, tenant in self._tenants.items():
            # A tenant whose waiting requests are all aside has no turn below.
            if (online.is_parked(name) or tenant.turns.aside) and self._first_in_share(name, now):
                if online.is_parked(name):
                    online.unpark(name)
                self._note_busy(name, now)
        aside = next(iter(turns.aside), None)
        if aside and self._is_in_share(aside) and self._try(aside, take, now):
            self._end_turns(turns)
        num_passes = 0
        while first := online.first():
            if (queued := self._first_in_share(first.tenant, now)) is None:
                online.park(first.tenant)
                self._note_busy(first.tenant, now)
            elif self._try(queued, take, now):
                if not turns.may_pass:
                    self._end_turns(turns)
            elif queued.is_waiting:
                turns.begin(now)
                if not turns.may_pass or num_passes == _MAX_PASSES:
                    return
                num_passes += 1
                self._set_aside(queued, turns)
        if not online.num_competing:
            self._end_turns(turns)
        else:
            self._put_back(turns, but=1)  # the next run tries the requests put back

    def _run_offline(self, take: Take, now: float) -> None:
        """Try the first offline request of each tenant. A tenant whose request finds no room is skipped in this run."""
        passed: list[str] = []
        while not self._online.num_competing and len(passed) < _MAX_PASSES:
            if (queued := self._offline.first()) is None:
                break
            may_go = queued.tenant not in self._tenants and self._is_in_share(queued)
            if not (may_go and self._try(queued, take, now)) and queued.is_waiting:
                self._offline.park(queued.tenant)
                passed.append(queued.tenant)
        for name in passed:
            self._offline.unpark(name, keeps_claim=True)

    def _first_in_share(self, name: str, now: float) -> QueuedRequest | None:
        """Return the tenant's next request if it is within the tenant's share, and make it first in the queue."""
        turns = self._tenants[name].turns
        if turns.aside and self._is_in_share(next(iter(turns.aside))):
            self._end_turns(turns)
        for num_passes in range(_MAX_PASSES + 1):
            if (queued := self._online.first_of(name)) is None:
                break
            if self._is_in_share(queued):
                if not turns.may_pass:
                    self._end_turns(turns)
                return queued
            turns.begin(now)
            if not turns.may_pass or num_passes == _MAX_PASSES:
                return None
            self._set_aside(queued, turns)
        self._put_back(turns, but=1)
        return None

    def _is_in_share(self, queued: QueuedRequest) -> bool:
        share, own = self._share(), self._held.get(queued.tenant, NO_PLACES)
        if share >= 1 or not own.num_streams:
            return True
        self._free = self._free or self._free_at_replicas()
        return is_within_share(own, queued.places, self._free, share=share)

    def _try(self, queued: QueuedRequest, take: Take, now: float) -> bool:
        if not take(queued):
            return False
        self._queue_of(queued).pop(queued)
        if queued.priority < OFFLINE:
            self._rate.add(queued.cost, now)
            self._tenants[queued.tenant].rate.add(queued.cost, now)
        self._hold(queued.tenant, self._held.get(queued.tenant, NO_PLACES).plus(queued.places))
        self._free = self._free.less(queued.places) if self._free else None
        self._has_left(queued, now)
        return True

    def _hold(self, tenant: str, places: Places) -> None:
        if places.num_streams:
            self._held[tenant] = places
        else:
            self._held.pop(tenant, None)

    def _has_left(self, queued: QueuedRequest, now: float) -> None:
        """Forget the state that is kept only while the request waits."""
        if queued.priority >= OFFLINE:
            return
        self._turns.aside.pop(queued, None)
        tenant = self._tenants[queued.tenant]
        tenant.turns.aside.pop(queued, None)
        if not self._online.num_waiting_of(queued.tenant):
            del self._tenants[queued.tenant]
        self._note_busy(queued.tenant, now)

    def _note_busy(self, name: str, now: float) -> None:
        self._rate.note(now, is_busy=self._online.num_competing > 0)
        if tenant := self._tenants.get(name):
            tenant.rate.note(now, is_busy=True)

    def _set_aside(self, queued: QueuedRequest, turns: _Turns) -> None:
        self._online.move(queued, State.ASIDE)
        turns.aside[queued] = None

    def _put_back(self, turns: _Turns, *, but: int = 0) -> None:
        for queued in list(turns.aside)[but:]:
            del turns.aside[queued]
            self._online.move(queued, State.READY)

    def _end_turns(self, turns: _Turns) -> None:
        """Stop the alternation of turns and return to the strict order.

        A request that only leaves the queue does not end the turns, or a client could reset them by resending it.
        """
        turns.end()
        self._put_back(turns)

    def _queue_of(self, queued: QueuedRequest) -> FairQueue:
        return self._offline if queued.priority >= OFFLINE else self._online

    def _is_full_for(self, queued: QueuedRequest) -> bool:
        """Return whether the queue is full for this request.

        A user may fill half of the queue slots that other users leave free, a tenant three quarters of those that other
        tenants leave free.
        """
        queue, limit = self._queue_of(queued), self._max_waiting
        of_tenant = queue.num_waiting_of(queued.tenant)
        total = queue.num_competing + (of_tenant if queue.is_parked(queued.tenant) else 0)
        return total + queue.num_waiting_of(*queued.names) >= limit or 3 * total + of_tenant >= 3 * limit

    def _retry_s(self, queued: QueuedRequest, within_s: float) -> float:
        return max(_MIN_RETRY_S, self.wait_s(queued) - within_s)


def is_within_share(own: Places, more: Places, free: Places, *, share: float) -> bool:
    """Return whether a tenant that holds `own` may take `more`, while `free` places are unused by all tenants.

    The share does not limit a tenant that holds nothing. The block limit is waived for a request that exceeds the share
    by itself; otherwise its tenant's smaller requests would starve it.
    """
    if not own.num_streams:
        return True
    most_blocks = share * (own.num_blocks + free.num_blocks)
    is_one_of_many = own.num_blocks + more.num_blocks > most_blocks >= more.num_blocks
    return own.num_streams + more.num_streams <= share * (own.num_streams + free.num_streams) and not is_one_of_many


def most_choices(num_places: int, *, share: float) -> int:
    """Return the maximum number of choices of one request on replicas with num_places streams in total."""
    return max(1, int(share * num_places))


class _Tenant:
    """State of a tenant with waiting requests."""

    def __init__(self, hold_s: float) -> None:
        self.turns = _Turns(hold_s)  # on while the tenant's first request exceeds the tenant's share
        self.rate = _DrainRate()


class _Turns:
    """Alternation between strict order and passing, each for hold_s, while a request finds no room."""

    def __init__(self, hold_s: float) -> None:
        self.aside: dict[QueuedRequest, None] = {}  # requests that others may pass, in order
        self._hold_s = hold_s
        self._began_at: float | None = None
        self._number = 0

    @property
    def is_on(self) -> bool:
        return self._began_at is not None

    @property
    def may_pass(self) -> bool:
        return self._number % 2 == 1

    @property
    def end_at(self) -> float:
        return (self._began_at or 0.0) + (self._number + 1) * self._hold_s

    def begin(self, now: float) -> None:
        if self._began_at is None:
            self._began_at = now

    def advance(self, now: float) -> bool:
        """Return whether another turn has begun."""
        before = self._number
        if self._began_at is not None:
            self._number = int((now - self._began_at) / self._hold_s + 1e-6)  # a timer may fire a little early
        return self._number != before

    def end(self) -> None:
        self._began_at, self._number = None, 0


class _DrainRate:
    """Rate of admitted work, over the time during which requests waited."""

    def __init__(self) -> None:
        self._began_at: float | None = None  # None: no request waits
        self._busy_s = 0.0
        self._admitted: deque[tuple[float, float]] = deque(maxlen=_MEASURED)  # (busy time, cost)

    @property
    def per_s(self) -> float:
        """Tokens of work per second; 0 before enough admissions."""
        if len(self._admitted) < _MIN_MEASURED:
            return 0.0
        seconds = self._admitted[-1][0] - self._admitted[0][0]
        return sum(cost for _, cost in list(self._admitted)[1:]) / seconds if seconds > 0 else 0.0

    def note(self, now: float, *, is_busy: bool) -> None:
        if is_busy and self._began_at is None:
            self._began_at = now
        elif not is_busy and self._began_at is not None:
            self._busy_s, self._began_at = self._busy_s + now - self._began_at, None

    def add(self, cost: float, now: float) -> None:
        """Count an admitted request, unless it was admitted without waiting."""
        if self._began_at is not None and now > self._began_at:
            self._admitted.append((self._busy_s + now - self._began_at, cost))
