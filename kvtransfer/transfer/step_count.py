"""Step counter that the ranks of a replica use as their common clock."""

from __future__ import annotations

import threading

from core.types.errors import TransferError


class StepCount:
    """Number of steps that rank 0 has broadcast, or that another rank has executed (on a GPU: enqueued).

    One thread counts, any thread may read.
    """

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()

    @property
    def number(self) -> int:
        return self._number

    def add(self) -> None:
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        """Wait until `number` steps have been counted. Raises TransferError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number >= number, timeout_s):
                raise TransferError(f"rank executed {self._number} of {number} steps within {timeout_s} s")
