"""Admission of requests, which wait in the router for their turn and for replicas with room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from core.types.errors import CapacityError
from core.types.request import OFFLINE, Role, SequenceRequest
from router.routing.admission_queue import AdmissionQueue
from router.routing.fair_queue import Places, QueuedRequest
from router.serving.reservations import Pair, Reservations
from router.telemetry.metrics import Metrics

T = TypeVar("T")


class AdmissionWaits(Generic[T]):
    """Set of tasks that wait for their turn in an AdmissionQueue. Belongs to the event loop.

    Each task passes a `choose`, which reserves room for the request and returns the reservation, or None if no room is
    free. It is called at the request's turn, and again after every `wake`.
    """

    def __init__(self, queue: AdmissionQueue, *, queue_s: float) -> None:
        """queue_s: maximum wait of a request."""
        self.queue = queue
        self._queue_s = queue_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[QueuedRequest, tuple[Callable[[], T | None], asyncio.Future[T]]] = {}
        self._timer: asyncio.TimerHandle | None = None  # fires at the next change of turns

    async def enter(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | None],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """Wait for the request's turn and return the result of `choose`.

        The request counts towards its tenant's share until `leave`. Raises CapacityError, at once if its turn is
        predicted too late for within_s (None: no deadline), else after min(within_s, queue_s); also raises the errors
        of `choose`. If the task is cancelled after `choose` has reserved, the result goes to `give_back`.
        """
        limit_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        self.queue.add(queued, within_s=limit_s, now=self._loop.time())
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[queued] = (choose, future)
        is_admitted = False
        try:
            if not self.queue.is_blocked:
                self.wake()
            if not future.done():
                await asyncio.wait({future}, timeout=limit_s)
            if not future.done():
                hint_s = 1.0 if queued.priority >= OFFLINE else max(1.0, self.queue.wait_s(queued))
                raise CapacityError(f"{self._reason(queued)} within {limit_s:.3g} s", retry_after_s=hint_s)
            taken = future.result()
            is_admitted = True
            return taken
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self.queue.release(queued)
                give_back(future.result())
            raise
        finally:
            # An error in the future refers to this frame, which would be a reference cycle.
            del self._waiting[queued], future
            if not is_admitted:
                self.queue.remove(queued, now=self._loop.time())
                self.wake()  # the next request may need less room

    def leave(self, queued: QueuedRequest) -> None:
        """Release the places of an admitted request."""
        self.queue.release(queued)
        self.wake()

    def wake(self) -> None:
        """Run the queue after a replica's report or the end of a reservation, since room may have come free."""
        self.queue.run(self._take, now=self._loop.time())
        if self._timer:
            self._timer.cancel()
        when = self.queue.changes_at()
        self._timer = self._loop.call_at(when, self.wake) if when is not None else None

    def _take(self, queued: QueuedRequest) -> bool:
        choose, future = self._waiting[queued]
        try:
            taken = choose()
        except Exception as error:  # an error inside a policy ends only this request
            future.set_exception(error)
            del future  # avoids a reference cycle, as in `enter`
            self.queue.remove(queued, now=self._loop.time())
            return False
        if taken is None:
            return False
        future.set_result(taken)
        return True

    def _reason(self, queued: QueuedRequest) -> str:
        if queued.priority >= OFFLINE:
            return "online requests left no room"
        return (
            "its tenant had its share of the replicas"
            if self.queue.is_at_share(queued.tenant)
            else "no replica had room"
        )


class PairAdmission:
    """Admission of one router's requests to pairs of replicas."""

    def __init__(
        self,
        reservations: Reservations,
        *,
        queue_s: float,
        max_waiting: int,
        tenant_share: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        """queue_s: maximum wait of a request. tenant_share: returns the share of the decode capacity that one tenant
        may take while others compete."""
        self._reservations = reservations
        self._queue_s = queue_s
        self._tenant_share = tenant_share
        self._metrics = metrics
        self._queue = AdmissionQueue(max_waiting=max_waiting, share=tenant_share, free=reservations.free_places)
        self._waits: AdmissionWaits[Pair] = AdmissionWaits(self._queue, queue_s=queue_s)
        self._now = asyncio.get_running_loop().time
        reservations.on_change = self._waits.wake
        metrics.requests_waiting.set_function(lambda: self.num_waiting)
        for role in Role:
            metrics.usable_replicas.labels(role).set_function(partial(reservations.replicas.num_usable, role))
        metrics.tenants_at_share.set_function(lambda: self._queue.num_at_share)

    @property
    def num_waiting(self) -> int:
        """Number of online requests that wait for a replica with room, or for their tenant's share."""
        return len(self._queue)

    @property
    def held(self) -> Mapping[str, Places]:
        """Places with which the running requests of each tenant were admitted."""
        return self._queue.held

    @asynccontextmanager
    async def admit(self, request: SequenceRequest) -> AsyncIterator[Pair]:
        """Yield the cheapest pair with room, at the request's turn. The caller releases the pair.

        Raises CapacityError, at once if its turn is predicted too late; RequestError if no replica can ever hold the
        request; ModelUnavailable if no replica can answer within queue_s, at once if none could for that long already.
        """
        reservations, availability = self._reservations, self._reservations.replicas.availability
        availability.check(within_s=self._queue_s)
        began_at = self._now()
        demand = reservations.demand(request)
        reservations.check_fit(request, share=self._tenant_share())
        queued = QueuedRequest(
            request.tenant, request.priority, reservations.cost(request), user=request.user, places=demand.need.places
        )
        try:
            pair = await self._waits.enter(
                queued,
                lambda: reservations.with_room(
                    demand, num_waiting=self.num_waiting, may_displace=self._may_displace(queued)
                ),
                within_s=request.deadline_s,
                give_back=reservations.release,
            )
        except CapacityError as error:
            if availability.look() is not None:
                raise availability.error() from error
            raise
        try:
            self._metrics.queue_time.observe(self._now() - began_at)
            yield pair
        finally:
            self._waits.leave(queued)

    def _may_displace(self, queued: QueuedRequest) -> bool:
        """Return whether the tenant, with this request, stays within the blocks that other tenants must leave free.

        If so, a full replica takes the request and preempts other tenants' answers that have grown into these blocks
        (engine.scheduler.admission_rules).
        """
        held = self._queue.held.get(queued.tenant)
        own_blocks = queued.places.num_blocks + (held.num_blocks if held else 0)
        all_blocks = self._reservations.num_decode_blocks()
        return queued.priority < OFFLINE and own_blocks <= (1 - self._tenant_share()) * all_blocks
