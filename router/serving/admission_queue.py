"""Where requests wait until a replica has room for them.

In order, as a rule. A request that finds no room holds up all behind it, for `hold_s`; then, for as long, whoever fits
may pass it, and so on in turns. So what needs much room can wait for it while nobody takes it away, and never for
longer than that at the expense of others.

Whoever enters last is behind all of these: it is asked only while none of them waits, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from core.types.errors import CapacityError
from router.routing.admission import AdmissionQueue
from router.routing.fair_shares import QueuedRequest

T = TypeVar("T")

_HOLD_S = 2.0
_LOOKS = 4  # at requests that may pass, in one wake: each costs a decision
_SKIPS = 256  # of those whose like was looked at, in one wake


class AdmissionGate(Generic[T]):
    """Lets requests pass in the order of an AdmissionQueue. Belongs to the event loop.

    Each brings a `choose`, which takes what it needs and returns it, or None while there is no room. It is asked when
    it is the request's turn, again after every `wake`.
    """

    def __init__(
        self, *, max_waiting: int, queue_s: float, hold_s: float = _HOLD_S, lacking: str = "no replica had room"
    ) -> None:
        """queue_s: how long a request may wait, and what a prediction is held against. lacking: said to whoever waited
        for so long."""
        self._queue = AdmissionQueue(max_waiting=max_waiting)
        self._queue_s = queue_s
        self._hold_s = hold_s
        self._lacking = lacking
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._waiting: dict[QueuedRequest, tuple[Callable[[], T | None], asyncio.Future[T]]] = {}
        self._aside: dict[QueuedRequest, None] = {}  # those that found no room while others may pass; in order
        self._may_pass = False
        self._turn: asyncio.TimerHandle | None = None  # of changing that; None: nobody holds up others
        self._last = AdmissionQueue(max_waiting=max_waiting)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def enter(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | None],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """What `choose` takes, at this request's turn.

        Raises CapacityError, at once if its turn would come later than `within_s` (None: no deadline), and whatever
        `choose` raises. Where the prediction was wrong it comes after min(within_s, queue_s). What was taken for a
        request that has been cancelled meanwhile goes to `give_back`.
        """
        if not len(self._queue) and (taken := choose()) is not None:
            return taken
        limit_s = self._limit_s(within_s)
        self._queue.add(queued, within_s=limit_s, now=self._now())
        try:
            taken = await self._wait(queued, choose, ask=self._hold, limit_s=limit_s, give_back=give_back)
            if taken is None:
                hint_s = max(1.0, self._queue.wait_s(queued))
                raise CapacityError(f"{self._lacking} within {limit_s:.3g} s", retry_after_s=hint_s)
            return taken
        finally:
            self._leave(queued, self._queue)
            self.wake()  # the next one may need less

    async def enter_last(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | None],
        *,
        within_s: float | None,
        give_back: Callable[[T], None],
    ) -> T:
        """The same for a request that comes after all of those, whenever they come; among its like there are shares,
        too. When its turn would come is not predicted.

        Raises CapacityError, at once where too many of its like wait, and after min(within_s, queue_s); and whatever
        `choose` raises.
        """
        limit_s = self._limit_s(within_s)
        self._last.add(queued, within_s=math.inf, now=self._now())
        try:
            taken = await self._wait(queued, choose, ask=self._ask_last, limit_s=limit_s, give_back=give_back)
            if taken is None:
                raise CapacityError(f"others came before it for {limit_s:.3g} s", retry_after_s=1.0)
            return taken
        finally:
            self._leave(queued, self._last)

    def _hold(self) -> None:
        """The first that waits has its time of holding up others from now on."""
        if not self._turn:
            self.wake()

    def _limit_s(self, within_s: float | None) -> float:
        return self._queue_s if within_s is None else min(within_s, self._queue_s)

    async def _wait(
        self,
        queued: QueuedRequest,
        choose: Callable[[], T | None],
        *,
        ask: Callable[[], object],
        limit_s: float,
        give_back: Callable[[T], None],
    ) -> T | None:
        """What is taken for a request that is in a queue; None: nothing in time. ask: called first."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting[queued] = (choose, future)
        try:
            ask()
            await asyncio.wait({future}, timeout=limit_s)
            return future.result() if future.done() else None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                give_back(future.result())
            raise
        finally:
            del self._waiting[queued], future  # an error that it has knows this line, and would be in a circle

    def wake(self) -> None:
        """Something may have become free."""
        self._wake()
        self._ask_last()

    def _ask_last(self) -> None:
        """Whoever finds no room is asked again at the next wake; of a tenant one that finds none speaks for all."""
        aside, rejected = list[QueuedRequest](), set[str]()
        while not len(self._queue) and len(rejected) < _LOOKS and len(aside) < _SKIPS:
            if (queued := self._last.peek()) is None:
                break
            if queued.tenant in rejected:
                self._last.set_aside(queued)
                aside.append(queued)
            elif not self._try(queued, self._last) and queued.is_waiting:
                rejected.add(queued.tenant)
        for queued in aside:
            self._last.put_back(queued)

    def _wake(self) -> None:
        if self._aside and self._try(next(iter(self._aside)), self._queue):
            self._begin_anew()
        num_looks = 0
        while (queued := self._queue.peek()) is not None:
            if self._try(queued, self._queue):
                if not self._may_pass:
                    self._begin_anew()
            elif queued.is_waiting:
                if not self._turn:
                    self._turn = self._loop.call_later(self._hold_s, self._take_turns)
                if not self._may_pass or num_looks == _LOOKS:
                    return
                num_looks += 1
                self._queue.set_aside(queued)
                self._aside[queued] = None
        if not len(self._queue):
            self._begin_anew()
        else:
            self._put_back(but=1)  # all were asked; the next time they are again

    def _try(self, queued: QueuedRequest, queue: AdmissionQueue) -> bool:
        """Whether it has got what it needs. If it is refused, it waits no more either."""
        choose, future = self._waiting[queued]
        try:
            taken = choose()
        except Exception as error:  # also a policy's own: it ends this request, and nobody behind it
            future.set_exception(error)
            del future  # as in `_wait`
            self._leave(queued, queue)
            return False
        if taken is None:
            return False
        self._aside.pop(queued, None)
        queue.pop(queued, now=self._now())
        future.set_result(taken)
        return True

    def _leave(self, queued: QueuedRequest, queue: AdmissionQueue) -> None:
        self._aside.pop(queued, None)
        queue.remove(queued, now=self._now())

    def _begin_anew(self) -> None:
        """Nobody holds up others. Who only goes away does not bring this about: its like may come again and again."""
        if self._turn:
            self._turn.cancel()
        self._turn, self._may_pass = None, False
        self._put_back()

    def _take_turns(self) -> None:
        """Whoever holds up others has done so for its time; or they have passed it for theirs."""
        self._may_pass = not self._may_pass
        self._turn = self._loop.call_later(self._hold_s, self._take_turns)
        self._put_back()
        self.wake()

    def _put_back(self, *, but: int = 0) -> None:
        """All but so many of the first."""
        for queued in list(self._aside)[but:]:
            del self._aside[queued]
            self._queue.put_back(queued)
