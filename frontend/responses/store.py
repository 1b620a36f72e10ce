"""Interface of stores for responses, and their limits."""

from __future__ import annotations

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
