"""Who goes next because it has waited for too long, however fair that was. Pure.

Of those that wait side by side (the requests of a user, the users of a tenant, the tenants), one is aged when 16,384
tokens of work were taken from among them since it began to wait, or since it had its last turn. The one that has waited
for longest goes next, but for a sixteenth of the other work at most: so shares stay what they are for whoever keeps
asking, and nobody's wait depends on who comes after it.

The bound. Let C be the largest request, and n the number of those that had waited for longer when one began to wait.
Before its turn no more than 16,384 + 18 (n + 1) C tokens of other work are taken from among them: until it is aged,
16,384 and the request that reaches it; then, for each of the n, its own turn, 16 times as much of other work and the
request that reaches it; and as much once more for the turn that may have been before these.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from router.routing.open_heap import Key, OpenHeap

T = TypeVar("T")

_AGED_AFTER = 16_384.0  # tokens: a second or so of a large GPU's prompts, half a minute of a small machine's
_OTHER_WORK = 16  # tokens for each that an aged request takes


class Ageing(Generic[T]):
    """The items of one level that may be next, the one that has waited for longest first."""

    def __init__(self) -> None:
        self._waiting: OpenHeap[T] = OpenHeap()
        self._work = 0.0  # that was taken
        self._num_begun = 0
        self._owed = 0.0  # other work, before one may go by its age again

    def now(self) -> Key:
        """When something that begins to wait now has begun to; no two begin at once."""
        self._num_begun += 1
        return self._work, self._num_begun

    def add(self, item: T, since: Key) -> None:
        self._waiting.add(since, item)

    def discard(self, item: T) -> None:
        """It may not be next, or not any more."""
        self._waiting.discard(item)

    def first(self) -> T | None:
        """Who goes next by its age; None: nobody does now."""
        if self._owed > 0 or not len(self._waiting) or self._waiting.first_key()[0] + _AGED_AFTER > self._work:
            return None
        return self._waiting.first()

    def count(self, cost: float, *, is_by_age: bool) -> None:
        """Somebody had a turn."""
        self._work += cost
        self._owed = _OTHER_WORK * cost if is_by_age else max(0.0, self._owed - cost)
