"""Child process with a counter, for test_child_process."""

from __future__ import annotations

import os
import sys

from core.process.child_process import obey


class Counter:
    """Counter. Every public method is a command."""

    def __init__(self) -> None:
        self._count = int(sys.argv[2])

    def add(self, number: int) -> int:
        self._count += number
        return self._count

    def leave(self) -> None:
        os._exit(0)


if __name__ == "__main__":
    obey(Counter)
