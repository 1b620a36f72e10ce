"""Interface of stores for responses, their limits, and the store of a router without Redis."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

ENTRY_BYTES = 1024  # counted per entry beyond its value, so that the byte limit also bounds the number of entries
MAX_VALUE_BYTES = 4 * 2**20
SMALL_BYTES = 16 * 1024  # values up to this size are exempt from memory budgets and transfer slots


@dataclass(frozen=True, kw_only=True)
class StoreBounds:
    """Limits of a store. The oldest entries are evicted first; a tenant over its limit loses its own."""

    max_bytes: int  # of all tenants, including ENTRY_BYTES per entry
    ttl_s: float

    @property
    def max_of_tenant(self) -> int:
        """Limit per tenant, in bytes."""
        return self.max_bytes // 2

    def takes(self, value: bytes) -> bool:
        """Return whether a value of this size can be stored."""
        return len(value) <= MAX_VALUE_BYTES and len(value) + ENTRY_BYTES <= self.max_of_tenant


class ResponseStore(Protocol):
    """Values by tenant and id; tenants are isolated. Methods raise redis.RedisError if the store is unavailable."""

    async def put(self, tenant: str, id: str, value: bytes) -> None:
        """Store a value. id: never used before. value: accepted by `bounds.takes`."""
        ...

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        """Return the value, or its length if it exceeds SMALL_BYTES, or None if there is none."""
        ...

    async def get(self, tenant: str, id: str) -> bytes | None: ...

    async def delete(self, tenant: str, id: str) -> bool:
        """Delete a value. Return whether it existed."""
        ...


_Place = tuple[str, str]  # tenant, id


class MemoryResponses:
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
