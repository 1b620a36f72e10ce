"""Registry of the handoffs open on one receiving rank. Closing is final, even if Open arrives after Close. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from core.types.errors import HandoffExpired

T = TypeVar("T")

# An Open overtaken by its Close arrives within a call's deadline, before thousands of other handoffs close.
_MAX_CLOSED = 4096


class Register(Generic[T]):
    """Open entries by handoff id. Not thread-safe: the owner locks each call."""

    def __init__(self) -> None:
        self._open: dict[str, T] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def handoffs(self) -> list[str]:
        """Ids of the open handoffs."""
        return list(self._open)

    def open(self, handoff: str, entry: T) -> None:
        """Add `entry` unless the handoff is closed or open already; the first entry holds the received data."""
        if handoff not in self._closed:
            self._open.setdefault(handoff, entry)

    def close(self, handoff: str) -> T | None:
        self._closed[handoff] = None
        if len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        return self._open.pop(handoff, None)

    def get(self, handoff: str) -> T | None:
        return self._open.get(handoff)

    def find(self, handoff: str) -> T:
        """Return the open entry. Raises HandoffExpired."""
        if entry := self._open.get(handoff):
            return entry
        raise HandoffExpired(f"handoff {handoff} is not open here")
