"""A heap from which anything can be taken, not only what is first. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, int]


class OpenHeap(Generic[T]):
    """Items with keys, the smallest first; no two keys are equal, no item is there twice. An item is known by its
    identity. Each operation takes logarithmic time."""

    def __init__(self) -> None:
        self._entries: list[tuple[Key, T]] = []  # a binary heap: children of i at 2i + 1 and 2i + 2
        self._at: dict[int, int] = {}  # where each item is

    def __len__(self) -> int:
        return len(self._entries)

    def first(self) -> T:
        return self._entries[0][1]

    def first_key(self) -> Key:
        return self._entries[0][0]

    def add(self, key: Key, item: T) -> None:
        self._entries.append((key, item))
        self._rise(len(self._entries) - 1)

    def discard(self, item: T) -> None:
        """Take it out, if it is there."""
        if (at := self._at.pop(id(item), None)) is None:
            return
        last = self._entries.pop()
        if at < len(self._entries):
            self._entries[at] = last
            self._rise(self._sink(at))

    def _rise(self, at: int) -> None:
        entries, where = self._entries, self._at
        entry = entries[at]
        while at and entry[0] < entries[above := (at - 1) // 2][0]:
            entries[at] = entries[above]
            where[id(entries[at][1])] = at
            at = above
        entries[at] = entry
        where[id(entry[1])] = at

    def _sink(self, at: int) -> int:
        """Returns where it is now."""
        entries, where = self._entries, self._at
        entry, end = entries[at], len(entries)
        while (below := 2 * at + 1) < end:
            if below + 1 < end and entries[below + 1][0] < entries[below][0]:
                below += 1
            if entry[0] < entries[below][0]:
                break
            entries[at] = entries[below]
            where[id(entries[at][1])] = at
            at = below
        entries[at] = entry
        return at
