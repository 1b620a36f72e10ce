"""A few threads for what would hold up the event loop: reading, rendering and tokenising what is large."""

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
_Waiting: TypeAlias = dict[asyncio.Future[Any], Callable[[], Any]]  # the work of each, in order

_NUM_THREADS = 3
_MAX_PENDING = 64  # large requests of one router that are read at a time, or wait for it; each may be 10 MiB


class TextThreads:
    """Belongs to an event loop. The threads start when they are needed first.

    The keys of those who ask take turns. One key has three quarters of the places, and all threads but one.
    """

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_pending: int = _MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._pending: Counter[str] = Counter()  # by key, as the next two
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # whose turn is next, first
        self._is_closed = False

    async def run(self, key_id: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`. Raises CapacityError where too much waits already, and ModelUnavailable once closed.

        key_id: of the API key for which it is; empty: nobody's, and of these there may be as many as there is room for.
        Whoever is cancelled does not wait; work that has begun goes on to its end, other work is not done.
        """
        if self._is_closed:
            raise _closed()
        num_pending, of_key = self._pending.total(), self._pending[key_id] if key_id else 0
        if num_pending >= self._max_pending or 4 * of_key >= 3 * self._max_pending:
            raise CapacityError(f"{num_pending} large requests are being read already", retry_after_s=1.0)
        self._pending[key_id] += 1
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(partial(self._gone, key_id))
        self._waiting.setdefault(key_id, {})[future] = partial(work, *args, **kwargs)
        self._start_some()
        return await future

    def close(self) -> None:
        """What has begun goes on to its end, and what has not is not done: who waits for that hears so."""
        self._is_closed = True
        self._threads.shutdown(wait=False)  # none waits there: see _start_some
        waiting, self._waiting = self._waiting, OrderedDict()
        for key_id, works in waiting.items():
            for future in works:
                _less(self._pending, key_id)
                if not future.done():
                    future.set_exception(_closed())

    def _start_some(self) -> None:
        """As many as there are threads for."""
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
                _less(self._pending, key_id)
                continue
            self._running[key_id] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(partial(self._ended, key_id, future))

    def _gone(self, key_id: str, future: asyncio.Future[Any]) -> None:
        """Where nobody waits for it any more, what it would work on is not kept."""
        if future.cancelled() and future in (waiting := self._waiting.get(key_id, {})):
            _less(self._pending, key_id)
            del waiting[future]
            if not waiting:
                del self._waiting[key_id]

    def _ended(self, key_id: str, future: asyncio.Future[Any], running: asyncio.Future[Any]) -> None:
        _less(self._pending, key_id)
        _less(self._running, key_id)
        error = None if running.cancelled() else running.exception()
        if future.done():
            pass  # nobody waits for it any more, and nobody need hear of it
        elif running.cancelled():
            future.cancel()
        elif error:
            future.set_exception(error)
        else:
            future.set_result(running.result())
        if not running.cancelled():  # it is open
            self._start_some()


def _closed() -> ModelUnavailable:
    return ModelUnavailable("this router leaves the model that was asked for: ask again")


def _less(counts: Counter[str], key_id: str) -> None:
    counts[key_id] -= 1
    if not counts[key_id]:
        del counts[key_id]
