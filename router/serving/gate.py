"""Where requests wait until a replica has room for them.

In order, as a rule. A request that finds no room holds up all behind it, for `hold_s`; then, for as long, whoever fits
may pass it, and so on in turns. So what needs much room can wait for it while nobody takes it away, and never for
longer than that at the expense of others. A request that waits for what others of its tenant have holds up those of its
tenant in the same way, and nobody else.

Whoever enters last is behind all of these: it is asked only while none of them waits, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from cluster.words.errors import CapacityError
from router.routing.admission import AdmissionQueue
from router.routing.fair_shares import QueuedRequest

T = TypeVar("T")

_HOLD_S = 2.0
_LOOKS = 4  # at requests that may pass, in one wake: each costs a decision


class NoRoom(Enum):
    """Why a request has to wait."""

    FOR_ANYBODY = "no replica had room"
    FOR_ITS_TENANT = "its tenant had its share of the replicas"


@dataclass(eq=False)
class _Turns:
    """Whether whoever finds no room holds up the others, or they may pass."""

    tenant: str | None  # among whose requests; None: among all
    may_pass: bool = False
    timer: asyncio.TimerHandle | None = None  # of changing that; None: nobody holds up others
    aside: dict[QueuedRequest, None] = field(default_factory=dict)  # who found no room while others may pass; in order
    num_looks: int = 0  # in this wake


class AdmissionGate(Generic[T]):
    """Lets requests pass in the order of an AdmissionQueue. Belongs to the event loop.

    Each brings a `choose`, which takes what it needs and returns it, or says why it cannot. It is asked when it is the
    request's turn, again after every `wake`.
    """

    def __init__(self, *, max_waiting: int, queue_s: float, hold_s: float = _HOLD_S) -> None:
        """queue_s: how long a request may wait, and what a prediction is held against."""
        self._queue = AdmissionQueue(max_waiting=max_waiting)
        self._queue_s = queue_s
        self._hold_s = hold_s
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._waiting: dict[QueuedRequest, tuple[Callable[[], T | NoRoom], asyncio.Future[T]]] = {}
        self._turns: dict[str | None, _Turns] = {}  # as long as somebody has found no room; by tenant
        self._parked: set[str] = set()  # tenants of whom one holds up the others
        self._last = AdmissionQueue(max_waiting=max_waiting)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    @property
    def num_tenants_at_share(self) -> int:
        """Tenants of which somebody waits for what others of it have."""
        return len(self._turns.keys() - {None})

    async def enter(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | NoRoom],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """What `choose` takes, at this request's turn.

        Raises CapacityError, at once if its turn would come later than `within_s` (None: no deadline), and whatever
        `choose` raises. Where the prediction was wrong it comes after min(within_s, queue_s). What was taken for a
        request that has been cancelled meanwhile goes to `give_back`.
        """
        if not len(self._queue) and not isinstance(taken := choose(), NoRoom):
            return taken
        limit_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        self._queue.add(queued, within_s=limit_s, now=self._now())
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[queued] = (choose, future)
        try:
            if self._queue.peek() is queued:
                self.wake()  # what those before it wait for it may not need
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                return future.result()
            hint_s = max(1.0, self._queue.wait_s(queued))
            why = NoRoom.FOR_ITS_TENANT if queued.tenant in self._turns else NoRoom.FOR_ANYBODY
            raise CapacityError(f"{why.value} within {limit_s:g} s", retry_after_s=hint_s)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                give_back(future.result())
            raise
        finally:
            del self._waiting[queued]
            self._leave(queued)
            self.wake()  # the next one may need less

    async def enter_last(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | NoRoom],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """The same for a request that comes after all of those, whenever they come; among its like there are shares,
        too. When its turn would come is not predicted.

        Raises CapacityError, at once where too many of its like wait, and after min(within_s, queue_s); and whatever
        `choose` raises.
        """
        limit_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        self._last.add(queued, within_s=math.inf, now=self._now())
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[queued] = (choose, future)
        try:
            self._ask_last()
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                return future.result()
            raise CapacityError(f"others came before it for {limit_s:g} s", retry_after_s=1.0)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                give_back(future.result())
            raise
        finally:
            del self._waiting[queued]
            self._last.remove(queued, now=self._now())

    def wake(self) -> None:
        """Something may have become free."""
        self._wake()
        self._ask_last()

    def _ask_last(self) -> None:
        """Whoever finds no room is asked again at the next wake; a tenant that has its share holds up itself."""
        parked = list[str]()
        while not len(self._queue) and (queued := self._last.peek()) is not None:
            choose, future = self._waiting[queued]
            try:
                taken = choose()
            except Exception as error:  # as in _try
                future.set_exception(error)
                self._last.remove(queued, now=self._now())
                continue
            if taken is NoRoom.FOR_ANYBODY:
                break
            if isinstance(taken, NoRoom):
                self._last.park(queued.tenant)
                parked.append(queued.tenant)
                continue
            self._last.pop(queued, now=self._now())
            future.set_result(taken)
        for tenant in parked:
            self._last.unpark(tenant)

    def _wake(self) -> None:
        while self._parked:
            self._queue.unpark(self._parked.pop())
        for turns in list(self._turns.values()):
            turns.num_looks = 0
            if turns.aside and self._try(next(iter(turns.aside))) is True:
                self._begin_anew(turns)
        while (queued := self._queue.peek()) is not None:
            outcome = self._try(queued)
            if outcome is True:
                self._has_got(queued)
            elif isinstance(outcome, NoRoom) and not self._is_passed(queued, outcome):
                if outcome is NoRoom.FOR_ANYBODY:
                    return
                self._parked.add(queued.tenant)
                self._queue.park(queued.tenant)
        for turns in list(self._turns.values()):
            if not self._queue.num_waiting(turns.tenant):
                self._begin_anew(turns)
            elif turns.tenant not in self._parked:
                self._put_back(turns, but=1)  # all were asked; the next time they are again

    def _try(self, queued: QueuedRequest) -> NoRoom | bool:
        """True: it has got what it needs. False: it is refused, and waits no more either."""
        choose, future = self._waiting[queued]
        try:
            taken = choose()
        except Exception as error:  # also a policy's own: it ends this request, and nobody behind it
            future.set_exception(error)
            self._leave(queued)
            return False
        if isinstance(taken, NoRoom):
            return taken
        self._forget_aside(queued)
        self._queue.pop(queued, now=self._now())
        future.set_result(taken)
        return True

    def _has_got(self, queued: QueuedRequest) -> None:
        """It was the one that held up others."""
        for turns in (self._turns.get(None), self._turns.get(queued.tenant)):
            if turns and not turns.may_pass:
                self._begin_anew(turns)

    def _is_passed(self, queued: QueuedRequest, why: NoRoom) -> bool:
        """Whether it is set aside for others; it holds them up otherwise."""
        among = None if why is NoRoom.FOR_ANYBODY else queued.tenant
        turns = self._turns.setdefault(among, _Turns(among))
        if not turns.timer:
            turns.timer = self._loop.call_later(self._hold_s, self._take_turns, turns)
        if not turns.may_pass or turns.num_looks == _LOOKS:
            return False
        turns.num_looks += 1
        self._queue.set_aside(queued)
        turns.aside[queued] = None
        return True

    def _leave(self, queued: QueuedRequest) -> None:
        self._forget_aside(queued)
        self._queue.remove(queued, now=self._now())

    def _forget_aside(self, queued: QueuedRequest) -> None:
        for among in (None, queued.tenant):
            if turns := self._turns.get(among):
                turns.aside.pop(queued, None)

    def _begin_anew(self, turns: _Turns) -> None:
        """Nobody holds up others. Who only goes away does not bring this about: its like may come again and again."""
        if turns.timer:
            turns.timer.cancel()
        self._put_back(turns)
        self._turns.pop(turns.tenant, None)

    def _take_turns(self, turns: _Turns) -> None:
        """Whoever holds up others has done so for its time; or they have passed it for theirs."""
        turns.may_pass = not turns.may_pass
        turns.timer = self._loop.call_later(self._hold_s, self._take_turns, turns)
        self._put_back(turns)
        self.wake()

    def _put_back(self, turns: _Turns, *, but: int = 0) -> None:
        """All but so many of the first."""
        for queued in list(turns.aside)[but:]:
            del turns.aside[queued]
            self._queue.put_back(queued)
