"""Bytes of what is large, that a router has at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from core.types.errors import CapacityError


class ByteBudget:
    """Counts them, and says when they are too many: of all, or a quarter of that of one who asks. Belongs to an event
    loop."""

    def __init__(self, max_bytes: int, what: str) -> None:
        """what: they are of, for whoever hears that there are too many."""
        self._max_bytes = max_bytes
        self._what = what
        self._held: Counter[str] = Counter()  # by who has asked; empty: nobody, who may have as much as there is

    def add(self, whose: str, num_bytes: int) -> None:
        """num_bytes: below 0, of what is held no longer."""
        self._held[whose] += num_bytes
        if not self._held[whose]:
            del self._held[whose]

    def check(self, whose: str) -> None:
        """Raises CapacityError where there are too many."""
        if self._held.total() > self._max_bytes or (whose and 4 * self._held[whose] > self._max_bytes):
            raise CapacityError(f"too many large {self._what} are being read already", retry_after_s=1.0)

    @contextmanager
    def during(self, whose: str, num_bytes: int) -> Iterator[None]:
        """They are held in the block. Raises CapacityError before it."""
        self.add(whose, num_bytes)
        try:
            self.check(whose)
            yield
        finally:
            self.add(whose, -num_bytes)
