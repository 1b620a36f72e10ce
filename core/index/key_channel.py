"""Which API keys there are, from the controller, which owns them, to every router.

    <name>:keys                 hash of the book (JSON) and its seal
    <name>:keys:counted         set of the ids of keys, also revoked ones, for which there may be counts:
    <name>:key:<id>:used        what a key has asked for in the last minute: of the routers' limits
    <name>:key:<id>:running     its requests under way

None of these expires: a server that evicts what expires (volatile-lru, as the embedded one is set) keeps them, and one
that has lost them is told again. Raises redis.RedisError when Redis is away.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Any

from redis.asyncio import Redis

from core.identity.signing import is_signed, sign
from core.types.api_key import KeyRegistry

logger = logging.getLogger(__name__)


class KeyPublisher:
    """The controller's end."""

    def __init__(self, redis: Redis, *, name: str, signing_key: bytes) -> None:
        self._redis = redis
        self._name = name
        self._signing_key = signing_key

    async def publish(self, registry: KeyRegistry) -> None:
        """Have Redis say this, unless it does already."""
        text = registry.to_json()
        said = [text.encode(), sign(self._signing_key, text.encode())]
        # Both: whoever else may write to Redis may have changed either.
        if await self._redis.hmget(_place(self._name), "book", "seal") != said:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.hset(_place(self._name), mapping=dict(zip(("book", "seal"), said, strict=True)))
                if registry.keys:
                    pipeline.sadd(_counted(self._name), *(key.id for key in registry.keys))
                await pipeline.execute()

    async def forget_others(self, kept: Set[str]) -> None:
        """Nothing is counted any more for keys whose ids are not `kept`, whoever has told of them."""
        known: set[Any] = await self._redis.smembers(_counted(self._name))
        for member in known:  # others may have written there what no key is called
            if (key_id := member.decode(errors="replace")) not in kept:
                await self._redis.delete(*places_of(self._name, key_id))
                await self._redis.srem(_counted(self._name), member)

    async def close(self) -> None:
        await self._redis.aclose()


class KeyReader:
    """A router's end: remembers what it has read."""

    def __init__(self, redis: Redis, *, name: str, signing_key: bytes, least_version: int = 0) -> None:
        """least_version: of what is believed; an older book may have keys that were revoked since."""
        self._redis = redis
        self._name = name
        self._signing_key = signing_key
        self._version = least_version
        self._sign: bytes | None = None  # of what was believed last
        self._passed_over: object = None  # of which we have said so

    async def read(self) -> KeyRegistry | None:
        """The book, where it is newer than what was read before.

        What is not believed is looked at again: a right one may come under the same seal.
        """
        if self._sign and await self._redis.hget(_place(self._name), "seal") == self._sign:
            return None
        found: Any = await self._redis.hmget(_place(self._name), "book", "seal")
        try:
            text, shown = found
            if text is None or shown is None:  # it has come back empty: what is known still holds
                return None
            registry = self._opened(text, shown)
        except (ValueError, KeyError, TypeError) as error:
            if self._passed_over != found:
                logger.error("the keys in Redis are passed over: %s", error)
            self._passed_over = found
            return None
        self._version, self._sign = registry.version, shown
        return registry

    def _opened(self, text: bytes, shown: bytes) -> KeyRegistry:
        """Whoever else may write to Redis makes no keys, and brings none back. Raises ValueError and its kin."""
        if not is_signed(shown, self._signing_key, text):
            raise ValueError("their seal is not this deployment's")
        registry = KeyRegistry.from_json(text)
        if registry.version < self._version:
            raise ValueError(f"version {registry.version} is older than {self._version}, which there was before")
        return registry


def places_of(name: str, key_id: str) -> tuple[str, str]:
    """Where the limits of a key are counted: in the last minute, and under way."""
    return f"{name}:key:{key_id}:used", f"{name}:key:{key_id}:running"


def _place(name: str) -> str:
    return f"{name}:keys"


def _counted(name: str) -> str:
    return f"{name}:keys:counted"
