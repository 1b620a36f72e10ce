"""Store of responses in memory, and the stored responses of a router that uses it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable

from frontend.responses.store import ENTRY_BYTES, SMALL_BYTES, StoreBounds
from frontend.responses.stored import StoredResponses

_Place = tuple[str, str]  # tenant, id


class FakeResponses:
    """Implements ResponseStore. Bound to one event loop."""

    def __init__(self, bounds: StoreBounds, *, now: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._now = now
        self._entries: dict[_Place, tuple[float, bytes]] = {}  # expiry and value; the oldest first
        self._of_tenant: defaultdict[str, dict[str, None]] = defaultdict(dict)  # ids, the oldest first
        self._num_bytes: Counter[str] = Counter()  # by tenant

    async def put(self, tenant: str, id: str, value: bytes) -> None:
        self._expire()
        size = len(value) + ENTRY_BYTES
        while self._of_tenant[tenant] and self._num_bytes[tenant] + size > self._bounds.max_of_tenant:
            self._drop((tenant, next(iter(self._of_tenant[tenant]))))
        while self._entries and self._num_bytes.total() + size > self._bounds.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[tenant, id] = self._now() + self._bounds.ttl_s, value
        self._of_tenant[tenant][id] = None
        self._num_bytes[tenant] += size

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        value = await self.get(tenant, id)
        return value if value is None or len(value) <= SMALL_BYTES else len(value)

    async def get(self, tenant: str, id: str) -> bytes | None:
        self._expire()
        return self._entries[tenant, id][1] if (tenant, id) in self._entries else None

    async def delete(self, tenant: str, id: str) -> bool:
        self._expire()
        if is_there := (tenant, id) in self._entries:
            self._drop((tenant, id))
        return is_there

    def _expire(self) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= self._now():
            self._drop(next(iter(self._entries)))

    def _drop(self, place: _Place) -> None:
        tenant, id = place
        _, value = self._entries.pop(place)
        del self._of_tenant[tenant][id]
        self._num_bytes[tenant] -= len(value) + ENTRY_BYTES
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._num_bytes[tenant]


_ROOMY = StoreBounds(max_bytes=64 * 2**20, ttl_s=86_400.0)


def in_memory_responses(bounds: StoreBounds = _ROOMY) -> StoredResponses:
    return StoredResponses(FakeResponses(bounds), bounds)
