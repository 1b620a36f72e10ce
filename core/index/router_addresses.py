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

from core.identity.deployment_secrets import signed, verified
from core.index.redis_client import LeasedRecords, RedisReach

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
        self._records = LeasedRecords(redis, names=f"{name}:routers", record=f"{name}:router:", lease_s=_LEASE_S)
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
            await self._records.end(self._router)
        except RedisError as error:
            self._reach.missed(error)
        await self._redis.aclose()

    async def renew(self) -> None:
        """Write this router's record, with its lease."""
        text = json.dumps({"router": self._router, "address": self._address}).encode()
        await self._records.renew(self._router, signed(text, self._key))

    async def _read(self) -> dict[str, str]:
        """Return the addresses of the live routers. Ignores records that this deployment has not signed."""
        known = await self._records.read(most=_MAX_ROUTERS)
        return {name: address for name, record in known.items() if (address := self._opened(name, record))}

    def _opened(self, name: str, record: bytes) -> str | None:
        text = verified(record, self._key) if len(record) <= _MAX_RECORD_BYTES else None
        fields = json.loads(text) if text else {}
        return str(fields["address"]) if fields.get("router") == name else None
