"""Where responses are kept for whoever goes on from them, and what every such place keeps to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ENTRY_BYTES = 1024  # that each counts beside its value: so few bytes are never so many entries
MAX_VALUE_BYTES = 4 * 2**20  # of one
SMALL_BYTES = 16 * 1024  # of one that is got at once: there is always room for it, and it holds up nobody


@dataclass(frozen=True, kw_only=True)
class StoreBounds:
    """How much is kept, and for how long. What is oldest goes first: a tenant's own where that has too much."""

    max_bytes: int  # of all tenants; each entry counts ENTRY_BYTES more than its value has
    ttl_s: float

    @property
    def max_of_tenant(self) -> int:
        """Bytes."""
        return self.max_bytes // 2

    def takes(self, value: bytes) -> bool:
        """True if so large a value is kept at all."""
        return len(value) <= MAX_VALUE_BYTES and len(value) + ENTRY_BYTES <= self.max_of_tenant


class ResponseStore(Protocol):
    """Values by tenant and id: another tenant's are not there. Raises redis.RedisError where the store is away."""

    async def put(self, tenant: str, id: str, value: bytes) -> None:
        """id: one that there was never before. value: one that the bounds take."""
        ...

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        """The value; of one with more than SMALL_BYTES, how many it has. None: there is none."""
        ...

    async def get(self, tenant: str, id: str) -> bytes | None: ...

    async def delete(self, tenant: str, id: str) -> bool:
        """True if there was one."""
        ...
