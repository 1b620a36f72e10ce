"""How far a rank has come in what rank 0 orders: the one clock that the ranks of a replica share."""

from __future__ import annotations

import threading

from core.types.errors import TransferError


class StepCount:
    """On rank 0, the steps that the other ranks were told of; on another rank, those of them that it has carried out,
    which on a GPU means: enqueued. One thread counts, any may read."""

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
        """Return when so many have been counted. Raises TransferError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number >= number, timeout_s):
                raise TransferError(f"this rank has carried out {self._number} steps of {number} in {timeout_s} s")
