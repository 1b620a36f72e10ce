"""Where requests wait until a replica has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from cluster.words.errors import CapacityError
from router.routing.admission import AdmissionQueue, QueuedRequest

T = TypeVar("T")


class AdmissionGate(Generic[T]):
    """Lets requests pass in the order of an AdmissionQueue. Belongs to the event loop.

    Each brings a `choose`, which takes what it needs and returns it, or None while there is no room. It is asked when
    it is the request's turn, again after every `wake`.
    """

    def __init__(self, *, max_waiting: int, queue_s: float) -> None:
        """queue_s: how long a request may wait, and what a prediction is held against."""
        self._queue = AdmissionQueue(max_waiting=max_waiting)
        self._queue_s = queue_s
        self._now = asyncio.get_running_loop().time
        self._waiting: dict[QueuedRequest, tuple[Callable[[], T | None], asyncio.Future[T]]] = {}

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
        limit_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        self._queue.add(queued, within_s=limit_s, now=self._now())
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[queued] = (choose, future)
        try:
            await asyncio.wait({future}, timeout=limit_s)
            if future.done():
                return future.result()
            hint_s = max(1.0, self._queue.wait_s(queued))
            raise CapacityError(f"no replica had room within {limit_s:g} s", retry_after_s=hint_s)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                give_back(future.result())
            raise
        finally:
            del self._waiting[queued]
            self._queue.remove(queued, now=self._now())
            self.wake()  # the next one may need less

    def wake(self) -> None:
        """Something may have become free."""
        while (queued := self._queue.peek()) is not None:
            choose, future = self._waiting[queued]
            try:
                taken = choose()
            except Exception as error:  # also a policy's own: it ends this request, and nobody behind it
                future.set_exception(error)
                self._queue.remove(queued, now=self._now())
                continue
            if taken is None:
                return
            self._queue.pop(now=self._now())
            future.set_result(taken)
