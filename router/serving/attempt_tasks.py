"""The tasks of one attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from core.types.errors import ClusterError
from router.serving.choices import Choices

logger = logging.getLogger(__name__)


class AttemptTasks:
    """The failure of any of them ends the attempt, also one that nobody foresaw."""

    def __init__(self, choices: Choices, *, request_id: str) -> None:
        self._choices = choices
        self._request_id = request_id
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._done)
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """End those that have not ended. None is kept: with the error that a task holds and all that its lines were
        about, the request and its prompt would be a circle, and stay until the collector of those looks."""
        while tasks := self._tasks:
            self._tasks = []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.error("attempt failed request=%s", self._request_id, exc_info=error)
            self._choices.fail(ClusterError(f"internal error: {error!r}"))
