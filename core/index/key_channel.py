"""Distribution of the API keys from the controller, which owns them, to every router.

    <name>:keys                 hash with the registry (JSON) and its signature
    <name>:keys:counted         set of key ids, including revoked keys, that may have these counters:
    <name>:key:<id>:used        usage of a key in the last minute, for rate limits
    <name>:key:<id>:running     its running requests

None of these keys has a TTL, so a server that evicts volatile keys only (volatile-lru, as in the embedded one) keeps
them. The controller publishes again if Redis loses its data. Calls raise redis.RedisError while Redis is unreachable.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Any

from redis.asyncio import Redis

from core.identity.deployment_secrets import is_signed, sign
from core.index.redis_client import repaired
from core.types.api_key import KeyRegistry

logger = logging.getLogger(__name__)


class KeyPublisher:
    """Controller side of the key channel."""

    def __init__(self, redis: Redis, *, name: str, signing_key: bytes) -> None:
        self._redis = redis
        self._name = name
        self._signing_key = signing_key

    async def publish(self, registry: KeyRegistry) -> None:
        """Write the registry to Redis unless it is there already."""
        text = registry.to_json()
        values = [text.encode(), sign(self._signing_key, text.encode())]
        async with repaired(self._redis, {_place(self._name): "hash", _counted(self._name): "set"}):
            # Compare both fields: other writers of this Redis may have changed either.
            if await self._redis.hmget(_place(self._name), "book", "seal") != values:
                async with self._redis.pipeline(transaction=True) as pipeline:
                    pipeline.hset(_place(self._name), mapping=dict(zip(("book", "seal"), values, strict=True)))
                    if registry.keys:
                        pipeline.sadd(_counted(self._name), *(key.id for key in registry.keys))
                    await pipeline.execute()

    async def forget_others(self, kept: Set[str]) -> None:
        """Delete the counters of all keys whose ids are not in `kept`."""
        known: set[Any] = await self._redis.smembers(_counted(self._name))
        for member in known:  # decode leniently: other writers of this Redis may have added anything
            if (key_id := member.decode(errors="replace")) not in kept:
                await self._redis.delete(*places_of(self._name, key_id))
                await self._redis.srem(_counted(self._name), member)

    async def close(self) -> None:
        await self._redis.aclose()


class KeyReader:
    """Router side of the key channel. Remembers the last registry it read."""

    def __init__(self, redis: Redis, *, name: str, signing_key: bytes, least_version: int = 0) -> None:
        """least_version: lowest accepted version; older registries may contain keys that were revoked since."""
        self._redis = redis
        self._name = name
        self._signing_key = signing_key
        self._version = least_version
        self._sign: bytes | None = None  # signature of the last accepted registry
        self._rejected: object = None  # the last rejected value, logged once

    async def read(self) -> KeyRegistry | None:
        """Return the registry if it is newer than the last one read, else None.

        A rejected registry is checked again on each call, because a valid one may follow under the same signature.
        """
        if self._sign and await self._redis.hget(_place(self._name), "seal") == self._sign:
            return None
        found: Any = await self._redis.hmget(_place(self._name), "book", "seal")
        try:
            text, shown = found
            if text is None or shown is None:  # Redis lost its data: the registry read before stays valid
                return None
            registry = self._opened(text, shown)
        except (ValueError, KeyError, TypeError) as error:
            if self._rejected != found:
                logger.error("ignored the API keys in Redis: %s", error)
            self._rejected = found
            return None
        self._version, self._sign = registry.version, shown
        return registry

    def _opened(self, text: bytes, shown: bytes) -> KeyRegistry:
        """Parse a signed registry. Raises ValueError and the like for a forged, replayed or malformed one."""
        if not is_signed(shown, self._signing_key, text):
            raise ValueError("they are signed by another deployment")
        registry = KeyRegistry.from_json(text)
        if registry.version < self._version:
            raise ValueError(f"version {registry.version} is older than {self._version}, which was read before")
        return registry


def places_of(name: str, key_id: str) -> tuple[str, str]:
    """Return the Redis keys of a key's counters: usage in the last minute, and running requests."""
    return f"{name}:key:{key_id}:used", f"{name}:key:{key_id}:running"


def _place(name: str) -> str:
    return f"{name}:keys"


def _counted(name: str) -> str:
    return f"{name}:keys:counted"
