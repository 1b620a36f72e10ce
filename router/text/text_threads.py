"""A few threads for what would hold up the event loop: reading, rendering and tokenising what is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from cluster.words.errors import CapacityError

P = ParamSpec("P")
T = TypeVar("T")

_NUM_THREADS = 2
_MAX_PENDING = 64  # large requests of one router that are read at a time, or wait for it; each may be 10 MiB


class TextThreads:
    """Belongs to an event loop. The threads start when they are needed first."""

    def __init__(self, *, num_threads: int = _NUM_THREADS, max_pending: int = _MAX_PENDING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns or raises. Raises CapacityError where too much waits already.

        Whoever is cancelled does not wait; the work goes on to its end.
        """
        if self._num_pending >= self._max_pending:
            raise CapacityError(f"{self._num_pending} large requests are being read already", retry_after_s=1.0)
        self._num_pending += 1
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, partial(work, *args, **kwargs))
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    def _ended(self, future: asyncio.Future[T]) -> None:
        self._num_pending -= 1
        if not future.cancelled():
            future.exception()  # if nobody waits for it any more, nobody need hear of it

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
