"""A thread whose failure is not lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Runs `work` on a daemon thread. `run` waits for it, and raises what it raised."""

    def __init__(self, work: Callable[[], None], *, name: str) -> None:
        self.failure: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self) -> None:
        """Wait until the work has ended; raise its error if it failed."""
        self._thread.join()
        if self.failure:
            raise self.failure

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the edge of this thread: whatever ended it must be known
            logger.exception("%s ended", self._thread.name)
            self.failure = error
