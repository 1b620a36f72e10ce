"""Store of responses: its interface, its limits, and the deployment's Redis, which all its routers share.

    <name>:response:<tenant>:<id>     the signed value; it expires
    <name>:responses:of:<tenant>      sorted set of the tenant's entries, by time of storage
    <name>:responses:all              the same for all tenants
    <name>:responses:bytes            hash: bytes of each tenant, and `all`

Tenants and ids are stored as keyed hashes, so names reveal neither, and a client cannot name another tenant's entry.
An entry of a set is <tenant>:<id>:<bytes>. Sets and sums do not expire (see core/index/key_channel.py): each `put`
removes some expired entries, whichever tenant they belong to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis

from core.identity.deployment_secrets import SIGNATURE_BYTES, keyed_hash, signed, verified
from core.index.redis_client import repaired

T = TypeVar("T")

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
        """Return the value, its length if that exceeds SMALL_BYTES, or None without a value."""
        ...

    async def get(self, tenant: str, id: str) -> bytes | None: ...

    async def delete(self, tenant: str, id: str) -> bool:
        """Delete a value. Return whether it existed."""
        ...


_REDIS_TIME = -1

# KEYS sorted set of all, sums. ARGV[1] the deployment's name.
_DROP = """
local function drop(entry)
    redis.call('ZREM', KEYS[1], entry)
    local tenant, id, size = string.match(entry, '^(%x+):(%x+):(%d+)$')
    if not tenant then
        return
    end
    redis.call('ZREM', ARGV[1] .. ':responses:of:' .. tenant, entry)
    redis.call('DEL', ARGV[1] .. ':response:' .. tenant .. ':' .. id)
    for _, whose in ipairs({tenant, 'all'}) do
        if redis.call('HINCRBY', KEYS[2], whose, -size) <= 0 then
            redis.call('HDEL', KEYS[2], whose)
        end
    end
end
"""

# ARGV name, now (ms; negative: Redis's clock), tenant, id, value, counted bytes, ttl (ms), limit per tenant, in all.
# If a sum exceeds the limit although no entry is left, it is wrong, and is reset.
_PUT = (
    _DROP
    + """
local now, tenant, size, ttl = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[6]), tonumber(ARGV[7])
if now < 0 then
    local t = redis.call('TIME')
    now = t[1] * 1000 + math.floor(t[2] / 1000)
end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ttl, 'LIMIT', 0, 100)) do
    drop(entry)
end
local own = ARGV[1] .. ':responses:of:' .. tenant
for whose, set in pairs({[tenant] = own, all = KEYS[1]}) do
    local most = tonumber(ARGV[whose == 'all' and 9 or 8])
    while tonumber(redis.call('HGET', KEYS[2], whose) or 0) + size > most do
        local oldest = redis.call('ZRANGE', set, 0, 0)[1]
        if not oldest then
            redis.call('HDEL', KEYS[2], whose)
            break
        end
        redis.call('ZREM', set, oldest)
        drop(oldest)
    end
end
local entry = tenant .. ':' .. ARGV[4] .. ':' .. ARGV[6]
redis.call('SET', ARGV[1] .. ':response:' .. tenant .. ':' .. ARGV[4], ARGV[5], 'PX', ttl)
redis.call('ZADD', own, now, entry)
redis.call('ZADD', KEYS[1], now, entry)
redis.call('HINCRBY', KEYS[2], tenant, size)
redis.call('HINCRBY', KEYS[2], 'all', size)
"""
)

# ARGV name, tenant, id, and the counted bytes of an entry beyond its value.
_DELETE = (
    _DROP
    + """
local size = redis.call('STRLEN', ARGV[1] .. ':response:' .. ARGV[2] .. ':' .. ARGV[3])
if size == 0 then
    return 0
end
drop(ARGV[2] .. ':' .. ARGV[3] .. ':' .. string.format('%d', size + tonumber(ARGV[4])))
return 1
"""
)

# KEYS a value. ARGV maximum bytes to return; for a longer value, returns its length instead.
_LOOK = """
local size = redis.call('STRLEN', KEYS[1])
if size > tonumber(ARGV[1]) then
    return size
end
return redis.call('GET', KEYS[1])
"""


class RedisResponses:
    """Implements ResponseStore for all routers of the deployment `name`."""

    def __init__(
        self,
        redis: Redis,
        bounds: StoreBounds,
        *,
        name: str,
        key: bytes,
        large: Redis | None = None,
        now_ms: Callable[[], int] = lambda: _REDIS_TIME,
    ) -> None:
        """key: the deployment's key for names and signatures. large: client with a longer timeout, for large values;
        None: the same. now_ms: clock to use in place of Redis's."""
        self._large = large or redis
        self._bounds = bounds
        self._name = name
        self._key = key
        self._now_ms = now_ms
        self._put: Any = redis.register_script(_PUT)
        self._look: Any = redis.register_script(_LOOK)
        self._delete: Any = redis.register_script(_DELETE)
        self._tables = [f"{name}:responses:all", f"{name}:responses:bytes"]

    async def put(self, tenant: str, id: str, value: bytes) -> None:
        place = self._place(tenant, id)
        size, bounds = len(value) + ENTRY_BYTES, self._bounds
        stored = await _run(len(value), partial(signed, value, self._key, _bytes(place)))
        ttl_ms = round(bounds.ttl_s * 1e3)
        most = bounds.max_of_tenant, bounds.max_bytes
        args = [self._name, self._now_ms(), *place, stored, size, ttl_ms, *most]
        client = self._large if len(value) > SMALL_BYTES else None
        tables, sums = self._tables
        entries = f"{self._name}:responses:of:{place[0]}"
        async with repaired(self._large, {tables: "zset", sums: "hash", entries: "zset"}):
            await self._put(keys=self._tables, args=args, client=client)

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        """Return the value or its length. None also if the signature is invalid."""
        place = self._place(tenant, id)
        found: Any = await self._look(keys=[self._key_of(place)], args=[SIGNATURE_BYTES + SMALL_BYTES])
        if not isinstance(found, int):
            return self._verify(place, found)
        num_bytes = found - SIGNATURE_BYTES
        return num_bytes if num_bytes <= MAX_VALUE_BYTES else None  # larger ones are not ours

    async def get(self, tenant: str, id: str) -> bytes | None:
        """Return the value. None also if the signature is invalid."""
        place = self._place(tenant, id)
        found: Any = await self._large.get(self._key_of(place))
        return await _run(len(found or b""), partial(self._verify, place, found))

    async def delete(self, tenant: str, id: str) -> bool:
        place = self._place(tenant, id)
        overhead = ENTRY_BYTES - SIGNATURE_BYTES
        return bool(await self._delete(keys=self._tables, args=[self._name, *place, overhead]))

    def _key_of(self, place: tuple[str, str]) -> str:
        return "{}:response:{}:{}".format(self._name, *place)

    def _verify(self, place: tuple[str, str], found: bytes | None) -> bytes | None:
        return None if found is None else verified(found, self._key, _bytes(place))

    def _place(self, tenant: str, id: str) -> tuple[str, str]:
        """Return the hashes of the tenant, and of the id within that tenant."""
        return self._hashed(tenant), self._hashed(tenant, id)

    def _hashed(self, *words: str) -> str:
        return keyed_hash(self._key, *words, person=b"responses")


async def _run(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work`, on another thread if the value is large: 4 MiB take 5 ms. LargeTransfers bounds concurrency."""
    if num_bytes <= SMALL_BYTES + SIGNATURE_BYTES:
        return work()
    return await asyncio.to_thread(work)


def _bytes(place: tuple[str, str]) -> bytes:
    return "".join(place).encode()
