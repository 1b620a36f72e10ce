"""Registry of running parts, so that none outlives the check."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Running:
    """Process groups of running parts. Threads register theirs; an interruption ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both attributes below
        self._groups: set[int] = set()
        self._is_over = False

    @contextmanager
    def group(self, pid: int) -> Iterator[None]:
        """Register the process group of a leader. The group is ended with this block, or earlier by `end`."""
        with self._lock:
            self._groups.add(pid)
            if self._is_over:
                _kill(pid)
        try:
            yield
        finally:
            with self._lock:
                self._groups.discard(pid)
                _kill(pid)

    def end(self) -> None:
        """End all running groups, and any group that starts later."""
        with self._lock:
            self._is_over = True
            for pid in self._groups:
                _kill(pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):  # already ended
        os.killpg(group, signal.SIGKILL)
