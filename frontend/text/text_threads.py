"""Thread pool for work on large texts, which would block the event loop: parsing, rendering, tokenizing."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

from core.types.errors import CapacityError, ModelUnavailable

P = ParamSpec("P")
T = TypeVar("T")
_Waiting: TypeAlias = dict[asyncio.Future[Any], Callable[[], Any]]  # the work of each future, in order

_CLOSED = "this router stops serving the requested model; retry"
_NUM_THREADS = 3
_MAX_PENDING = 64  # large requests of one router, running or waiting; each may be 10 MiB


class TextThreads:
    """Thread pool that is fair among API keys. Bound to an event loop; threads start on first use.

    Keys take turns. One key gets at most 3/4 of the queue, and all threads but one.
    """

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_pending: int = _MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._pending: Counter[str] = Counter()  # by key, like the next two; subtraction drops counts of zero
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # in order of turns
        self._is_closed = False

    async def run(self, key_id: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on a thread. Raises CapacityError if the queue is full, ModelUnavailable once closed.

        key_id: API key to account the work to; empty: none, exempt from the per-key limit. Cancelling the caller
        discards queued work; running work continues to its end.
        """
        if self._is_closed:
            raise ModelUnavailable(_CLOSED)
        num_pending, of_key = self._pending.total(), self._pending[key_id] if key_id else 0
        if num_pending >= self._max_pending or 4 * of_key >= 3 * self._max_pending:
            raise CapacityError(f"too many large requests are being read: {num_pending}; retry", retry_after_s=1.0)
        self._pending[key_id] += 1
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(self._discard_cancelled, key_id))
        self._waiting.setdefault(key_id, {})[future] = partial(work, *args, **kwargs)
        self._start_some()
        return await future

    def close(self) -> None:
        """Discard queued work, whose callers get ModelUnavailable; running work continues to its end."""
        self._is_closed = True
        self._threads.shutdown(wait=False)  # its own queue is empty; see _start_some
        waiting, self._waiting = self._waiting, OrderedDict()
        for key_id, works in waiting.items():
            for future in works:
                self._pending -= Counter([key_id])
                if not future.done():
                    future.set_exception(ModelUnavailable(_CLOSED))

    def _start_some(self) -> None:
        most = max(1, self._num_threads - 1)
        while self._running.total() < self._num_threads:
            key_id = next((each for each in self._waiting if not each or self._running[each] < most), None)
            if key_id is None:
                return
            future = next(iter(self._waiting[key_id]))
            work = self._waiting[key_id].pop(future)
            if self._waiting[key_id]:
                self._waiting.move_to_end(key_id)
            else:
                del self._waiting[key_id]
            if future.cancelled():
                self._pending -= Counter([key_id])
                continue
            self._running[key_id] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(partial(self._ended, key_id, future))

    def _discard_cancelled(self, key_id: str, future: asyncio.Future[Any]) -> None:
        """Discard the queued work of a cancelled caller."""
        if future.cancelled() and future in (waiting := self._waiting.get(key_id, {})):
            self._pending -= Counter([key_id])
            del waiting[future]
            if not waiting:
                del self._waiting[key_id]

    def _ended(self, key_id: str, future: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        self._pending -= Counter([key_id])
        self._running -= Counter([key_id])
        error = None if running.cancelled() else running.exception()
        if future.done():
            pass  # the caller was cancelled
        elif running.cancelled():
            future.cancel()
        elif error:
            future.set_exception(error)
        else:
            future.set_result(running.result())
        if not running.cancelled():  # cancelled only by the closed pool
            self._start_some()
