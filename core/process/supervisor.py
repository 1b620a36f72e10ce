"""Supervision of background tasks: a task that dies is logged, counted and restarted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0
_WELL_S = 30.0  # a task that ran this long counts as recovered
_MAX_DEATHS = 5  # in a row; beyond, the process should be restarted


class Supervisor:
    """Supervised tasks of one event loop."""

    def __init__(
        self, *, died: Callable[[str], None] = lambda name: None, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        """died: called with the task's name at each death."""
        self._died = died
        self._first_pause_s = first_pause_s
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._deaths: dict[str, int] = {}  # in a row
        self._began_at: dict[str, float] = {}

    def start(self, name: str, work: Work) -> asyncio.Task[None]:
        """Run `work` and restart it when it ends, until the returned task is cancelled or this object is closed."""
        task = asyncio.create_task(self.keep_running(name, work))
        self._tasks[task] = name
        task.add_done_callback(self._forget)
        return task

    async def keep_running(self, name: str, work: Work) -> None:
        """Run `work` as `start` does, but in the caller's task."""
        this_task = asyncio.current_task()
        while True:
            self._began_at[name] = time.monotonic()
            error: Exception | None = None
            try:
                await work()
            except Exception as died:  # logged below: no caller awaits the task
                error = died
            if this_task and this_task.cancelling():  # libraries may swallow the cancellation
                return
            logger.error("task %s %s; restarting it", name, "died" if error else "ended", exc_info=error)
            if time.monotonic() - self._began_at[name] > _WELL_S:
                self._deaths.pop(name, None)
            deaths = self._deaths[name] = self._deaths.get(name, 0) + 1
            self._died(name)
            await asyncio.sleep(min(_MAX_PAUSE_S, self._first_pause_s * 2 ** min(deaths - 1, 10)))

    @property
    def failing(self) -> list[str]:
        """Names of the tasks that keep dying."""
        now = time.monotonic()
        return [
            name
            for name, deaths in self._deaths.items()
            if deaths >= _MAX_DEATHS and now - self._began_at[name] < _WELL_S
        ]

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        name = self._tasks.pop(task)
        self._deaths.pop(name, None)
        self._began_at.pop(name, None)
