"""The programs of parts that are under way, so that none outlives the check."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Running:
    """Process groups. Threads that run parts add theirs; whoever is interrupted ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of both below
        self._groups: set[int] = set()
        self._is_over = False

    @contextmanager
    def group(self, pid: int) -> Iterator[None]:
        """Of a process that leads one. What is left of it is ended with this block, or by `end` before."""
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
        """All that run, and at once whatever is started later."""
        with self._lock:
            self._is_over = True
            for pid in self._groups:
                _kill(pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(group, signal.SIGKILL)
