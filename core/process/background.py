"""Background threads whose exceptions are re-raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class BackgroundThread:
    """Daemon thread that runs `work`. `run` waits for it and re-raises its exception."""

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
        """Wait until the work has ended. Raises its exception if it failed."""
        self._thread.join()
        if self.failure:
            raise self.failure

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # kept for `run`, whatever ended the thread
            logger.exception("%s ended", self._thread.name)
            self.failure = error
