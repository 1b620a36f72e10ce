"""Which handoffs are open on one receiving rank. Closing is final, in whatever order the messages come. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from core.types.errors import HandoffExpired

T = TypeVar("T")

_MAX_CLOSED = 4096  # an Open overtaken by its Close comes within a call's deadline, not after thousands of others


class Register(Generic[T]):
    """Entries by handoff id. Its owner holds a lock over each call."""

    def __init__(self) -> None:
        self._open: dict[str, T] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def handoffs(self) -> list[str]:
        """Those that are open."""
        return list(self._open)

    def open(self, handoff: str, entry: T) -> None:
        """Does nothing if it has been closed already, or is open: the first entry has what arrived."""
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
        """Raises HandoffExpired."""
        if entry := self._open.get(handoff):
            return entry
        raise HandoffExpired(f"handoff {handoff} is not open here")
