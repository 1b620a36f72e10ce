"""Admission of requests: each waits in the router for its turn and for replicas with room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from core.types.errors import CapacityError
from core.types.request import OFFLINE, SequenceRequest
from router.routing.admission import AdmissionQueue
from router.routing.fair_queue import Places, QueuedRequest
from router.serving.reservations import Pair, Reservations
from router.telemetry.metrics import Metrics

T = TypeVar("T")


class AdmissionWaits(Generic[T]):
    """The tasks that wait for the turns of an AdmissionQueue. Belongs to the event loop.

    Each brings a `choose`, which takes what the request needs and returns it, or None while there is no room. It is
    called at the request's turn, again after every `wake`.
    """

    def __init__(self, queue: AdmissionQueue, *, queue_s: float) -> None:
        """queue_s: how long a request may wait at most."""
        self.queue = queue
        self._queue_s = queue_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[QueuedRequest, tuple[Callable[[], T | None], asyncio.Future[T]]] = {}
        self._timer: asyncio.TimerHandle | None = None  # for the next change of turns

    async def enter(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | None],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """Return what `choose` takes at this request's turn. The request counts towards its tenant's share until
        `leave`.

        Raises CapacityError, at once if its turn is predicted to come later than within_s (None: no deadline), else
        after min(within_s, queue_s); and whatever `choose` raises. If the task is cancelled, a place taken meanwhile
        goes to `give_back`.
        """
        limit_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        self.queue.add(queued, within_s=limit_s, now=self._loop.time())
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[queued] = (choose, future)
        is_admitted = False
        try:
            if not self.queue.is_held_up:
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
            del self._waiting[queued], future  # an error in the future refers to this frame: a cycle
            if not is_admitted:
                self.queue.remove(queued, now=self._loop.time())
                self.wake()  # the next one may need less

    def leave(self, queued: QueuedRequest) -> None:
        """Give the places of an admitted request to others."""
        self.queue.release(queued)
        self.wake()

    def wake(self) -> None:
        """Look for room: a replica has reported, or a reservation has ended."""
        self.queue.run(self._take, now=self._loop.time())
        if self._timer:
            self._timer.cancel()
        when = self.queue.changes_at()
        self._timer = self._loop.call_at(when, self.wake) if when is not None else None

    def _take(self, queued: QueuedRequest) -> bool:
        choose, future = self._waiting[queued]
        try:
            taken = choose()
        except Exception as error:  # a policy's own error, too, ends this request alone
            future.set_exception(error)
            del future  # a cycle, as in `enter`
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


class Admission:
    """Admits the requests of one router to pairs of replicas."""

    def __init__(
        self,
        reservations: Reservations,
        *,
        queue_s: float,
        max_waiting: int,
        tenant_share: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        """queue_s: how long a request may wait. tenant_share: part of the decode replicas that one tenant may
        have beside the others, at present."""
        self._reservations = reservations
        self._queue_s = queue_s
        self._tenant_share = tenant_share
        self._metrics = metrics
        self._queue = AdmissionQueue(max_waiting=max_waiting, share=tenant_share, free=reservations.free_places)
        self._waits: AdmissionWaits[Pair] = AdmissionWaits(self._queue, queue_s=queue_s)
        self._now = asyncio.get_running_loop().time
        reservations.on_change = self._waits.wake
        metrics.requests_waiting.set_function(lambda: self.num_waiting)
        metrics.tenants_at_share.set_function(lambda: self._queue.num_at_share)

    @property
    def num_waiting(self) -> int:
        """Online requests that wait for a replica with room, or for their tenant's share."""
        return len(self._queue)

    @property
    def held(self) -> Mapping[str, Places]:
        """Places that running requests of each tenant were admitted with."""
        return self._queue.held

    @asynccontextmanager
    async def admit(self, request: SequenceRequest) -> AsyncIterator[Pair]:
        """Yield the cheapest pair with room, at the request's turn. The caller releases the pair.

        Raises CapacityError, at once where its turn is predicted to come too late, and RequestError when no replica
        could ever hold the request. ModelUnavailable where no replica that answers has come in time, and at once where
        there has been none for so long.
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
                    demand, num_waiting=self.num_waiting, may_displace=self._is_owed(queued)
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

    def _is_owed(self, queued: QueuedRequest) -> bool:
        """Return whether replicas make way for it (engine.admission), where answers of other tenants have grown into
        what its tenant is owed: the blocks that no other tenant may have alone."""
        held = self._queue.held.get(queued.tenant)
        own_blocks = queued.places.num_blocks + (held.num_blocks if held else 0)
        all_blocks = self._reservations.num_decode_blocks()
        return queued.priority < OFFLINE and own_blocks <= (1 - self._tenant_share()) * all_blocks
