"""Memory budget for large values in a router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from core.types.errors import CapacityError


class ByteBudget:
    """Counts bytes held, and limits them: in all, and to a quarter for one owner. Bound to an event loop."""

    def __init__(self, max_bytes: int, name: str) -> None:
        """name: plural name of the values, for the error message."""
        self._max_bytes = max_bytes
        self._name = name
        self._held: Counter[str] = Counter()  # by owner; the empty owner has no limit of its own

    def add(self, owner: str, num_bytes: int) -> None:
        """Add bytes to an owner's count; a negative number releases them."""
        self._held[owner] += num_bytes
        if not self._held[owner]:
            del self._held[owner]

    def check(self, owner: str) -> None:
        """Raise CapacityError if the budget is exceeded."""
        if self._held.total() > self._max_bytes or (owner and 4 * self._held[owner] > self._max_bytes):
            raise CapacityError(f"too many large {self._name} are being read; retry", retry_after_s=1.0)

    @contextmanager
    def reserved(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Hold bytes for the duration of the block. Raises CapacityError before it."""
        self.add(owner, num_bytes)
        try:
            self.check(owner)
            yield
        finally:
            self.add(owner, -num_bytes)
