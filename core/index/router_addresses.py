"""Directory of the routers' admin addresses: each router registers its address and reads those of the others.

    <name>:routers             set of router names
    <name>:router:<router>     signature and address; expires 10 s after its last renewal

While Redis is unreachable, the last known addresses are kept.
"""

from __future__ import annotations

import asyncio
import json

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.identity.signing import signed, verified
from core.index.redis_client import RedisReach, repaired

_LEASE_S, _RENEW_S = 10.0, 3.0
_MAX_RECORD_BYTES = 1 << 10
_MAX_ROUTERS = 4096


class RouterAddresses:
    """Registration of one router and its view of the others. Belongs to the event loop. Owns `redis`."""

    def __init__(
        self, redis: Redis, known: dict[str, str], *, name: str, key: bytes, router: str, address: str
    ) -> None:
        """known: router name -> address, updated in place for its readers. name: of the deployment. key: 32-byte
        signing key of its routers. address: "host:port" of this router's admin listener, reachable by the others."""
        known[router] = address
        self._known = known
        self._is_leaving = False
        self._redis = redis
        self._key = key
        self._router = router
        self._address = address
        self._set, self._record = f"{name}:routers", f"{name}:router:"
        self._reach = RedisReach("the addresses of other routers stay as they are")

    async def run(self) -> None:
        """Renew the registration and read the others' until cancelled."""
        while not self._is_leaving:  # redis-py may swallow a cancellation
            try:
                await self.renew()
                found = await self._read() | {self._router: self._address}
                self._known.clear()
                self._known.update(found)
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            await asyncio.sleep(_RENEW_S)

    async def close(self) -> None:
        """Remove the registration at once, if Redis is reachable, and close the connection."""
        self._is_leaving = True
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                pipeline.delete(self._record + self._router)
                pipeline.srem(self._set, self._router)
                await pipeline.execute()
        except RedisError as error:
            self._reach.missed(error)
        await self._redis.aclose()

    async def renew(self) -> None:
        """Write this router's record, with its lease."""
        text = json.dumps({"router": self._router, "address": self._address}).encode()
        async with (
            repaired(self._redis, {self._set: "set"}),
            self._redis.pipeline(transaction=False) as pipeline,
        ):
            pipeline.set(self._record + self._router, signed(text, self._key), px=int(_LEASE_S * 1e3))
            pipeline.sadd(self._set, self._router)
            await pipeline.execute()

    async def _read(self) -> dict[str, str]:
        """Return the live routers. Ignores records that no process of this deployment has signed."""
        members = await self._redis.smembers(self._set)
        names = sorted(name.decode(errors="replace") if isinstance(name, bytes) else name for name in members)
        if not names:
            return {}
        records = await self._redis.mget([self._record + name for name in names[:_MAX_ROUTERS]])
        known = dict(zip(names, records, strict=False))
        if gone := [name for name, record in known.items() if record is None]:
            await self._redis.srem(self._set, *gone)
        return {name: address for name, record in known.items() if record and (address := self._opened(name, record))}

    def _opened(self, name: str, record: str | bytes) -> str | None:
        record = record.encode() if isinstance(record, str) else record
        text = verified(record, self._key) if len(record) <= _MAX_RECORD_BYTES else None
        fields = json.loads(text) if text else {}
        return str(fields["address"]) if fields.get("router") == name else None
