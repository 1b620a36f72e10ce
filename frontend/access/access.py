"""Access control of a router's endpoints: API keys and their limits, kept up to date."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.asyncio import Redis

from core.index.key_channel import KeyReader
from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from core.types.api_key import KeyRegistry
from core.types.errors import ClusterError, outcome_of
from frontend.access.keyring import Client, Keyring
from frontend.access.limiter import LocalLimiter
from frontend.access.limits import Limits
from frontend.access.redis_limiter import RedisLimiter

Count = Callable[[str], None]  # called with the outcome of a rejected request, by the metrics' names
_LIMITS_S = 0.5  # Redis timeout of a limit check, for which a request waits


class Access:
    """Keys and limits, shared by both endpoints. Bound to the router's event loop."""

    def __init__(self, keyring: Keyring, limits: Limits, *redises: Redis, count: Count = lambda outcome: None) -> None:
        """redises: closed with this object. count: called for each request rejected without a key."""
        self._count = count
        self.limits = limits
        self._keyring = keyring
        self._redises = redises
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def follow(
        cls,
        index_url: str,
        *,
        name: str,
        signing_key: bytes,
        salt_key: bytes,
        is_required: bool,
        reports_cached_tokens: bool,
        num_routers: int,
        count: Count,
        known: KeyRegistry | None = None,
        tasks: Supervisor | None = None,
    ) -> Access:
        """Read the keys of the deployment `name` and follow their changes.

        known: keys from the controller; an older registry in Redis is ignored. None: nothing is known yet.
        tasks: supervisor of the background tasks; None: a private one.
        """
        for_keys, for_limits = connect_redis(index_url), connect_redis(index_url, within_s=_LIMITS_S)
        least_version = known.version if known else 0
        reader = KeyReader(for_keys, name=name, signing_key=signing_key, least_version=least_version)
        keyring = Keyring(
            reader, salt_key=salt_key, is_required=is_required, reports_cached_tokens=reports_cached_tokens
        )
        limits = Limits(RedisLimiter(for_limits, name=name), LocalLimiter(num_routers=num_routers))
        access = cls(keyring, limits, for_keys, for_limits, count=count)
        if known:
            keyring.take(known)
        await keyring.read()
        supervisor = tasks or Supervisor()
        access._tasks = [
            supervisor.start("keys", keyring.follow_forever),
            supervisor.start("limits", limits.keep_forever),
        ]
        return access

    @classmethod
    def anybody(cls, salt_key: bytes = bytes(32)) -> Access:
        """Create access control without keys, for tests and keyless routers."""
        keyring = Keyring(None, salt_key=salt_key, is_required=False)
        return cls(keyring, Limits(None, LocalLimiter()))

    def identify(self, authorization: str | None, *, api_key: str | None = None) -> Client:
        """Return the client of a request from its `Authorization` and `X-Api-Key` headers. Raises Unauthenticated or
        KeysUnknown."""
        try:
            return self._keyring.identify(authorization, api_key=api_key)
        except ClusterError as error:
            self._count(outcome_of(error).code)
            raise

    @property
    def has_many_tenants(self) -> bool:
        """True if more than one tenant can send requests, so that fair shares matter."""
        return self._keyring.has_many_tenants

    async def close(self) -> None:
        self._keyring.close()
        self.limits.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.limits.settled()
        for redis in self._redises:
            await redis.aclose()
