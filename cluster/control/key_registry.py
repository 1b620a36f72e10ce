"""API keys of a deployment: stored by its controller, published to its routers through Redis.

The registry is kept in Ray's store and in a file on the head next to the deployment's logs, readable only by its owner,
so that a redeployment accepts the same clients. Redis only transports it and is refreshed every second. Only digests
are stored, no secrets.

A new key is valid once it is saved. A revoked key is rejected first and saved afterwards, so that a full disk cannot
keep it valid.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from redis.exceptions import RedisError

from cluster.ray import store
from cluster.ray.store import namespace
from core.identity.deployment_secrets import Purpose
from core.index.key_channel import KeyPublisher
from core.index.redis_client import RedisReach, connect_redis
from core.process.atomic_file import write_whole
from core.process.supervisor import Supervisor
from core.types.api_key import ApiKey, KeyChange, KeyRegistry
from core.types.errors import DeployError, SpecError
from core.types.launch import Launch

logger = logging.getLogger(__name__)

_FILE, _ENTRY = "keys.json", "keys"
_PUBLISH_S = 1.0


def key_file(log_dir: str) -> Path:
    """Return the path of the key file on the head. log_dir: the deployment's log directory."""
    return Path(log_dir).parent / _FILE


def read_registry(file: Path) -> KeyRegistry:
    """Read a key file; a missing file is an empty registry.

    Raises DeployError if it cannot be read: treated as empty, it would lock out all clients and be overwritten.
    """
    try:
        return KeyRegistry.from_json(file.read_bytes())
    except FileNotFoundError:
        return KeyRegistry()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a registry of API keys"
        raise DeployError(
            f"{file}: {why}; put back a copy of it, or delete it and make new keys for all clients"
        ) from None


class KeyKeeper:
    """Owner of the key registry, on the controller's event loop."""

    def __init__(self, launch: Launch) -> None:
        name, credentials = launch.spec.name, launch.credentials
        # Set if this deployment uses the endpoints of another one.
        self._endpoints = launch.spec.router.endpoints
        self._file = key_file(launch.log_dir)
        self._space = namespace(name)
        self.registry = self._load()
        # Why the last save failed; empty if it succeeded.
        self._problem = ""
        # Either copy may be lost: Ray's store with a new head disk, or the file.
        if self.registry.version and self._save():
            logger.warning("%s", self._problem)
        self._publisher = KeyPublisher(
            connect_redis(credentials.index_url), name=name, signing_key=credentials.key(Purpose.API_KEYS)
        )
        self._reach = RedisReach("API keys are published when it is back")
        self._is_closing = False
        self._publishing = Supervisor().start("publish API keys", self._publish_forever)

    async def add(self, key: ApiKey) -> KeyChange:
        """Add a key; routers accept it within a second of publication.

        Raises SpecError if its name is taken, and DeployError if it cannot be saved; nothing has changed then.
        """
        if self._endpoints:
            raise SpecError(
                f"it uses the endpoints of {self._endpoints} and its API keys: add --name {self._endpoints}"
            )
        registry = self.registry.with_key(key)
        try:
            write_whole(self._file, registry.to_json())
            store.put(self._space, _ENTRY, registry.to_json())
        except DeployError as error:
            with suppress(DeployError):
                write_whole(self._file, self.registry.to_json())
            raise DeployError(f"the key was not created: {error}") from error
        self.registry = registry
        return KeyChange(key=key, is_published=await self._publish())

    async def revoke(self, key: ApiKey) -> KeyChange:
        """Revoke a key; routers reject it within a second of publication, even if saving fails.

        Idempotent: Ray repeats a call that a controller had not answered when it died.
        """
        self.registry = self.registry.without(key)
        is_published = await self._publish()
        return KeyChange(key=key, is_published=is_published, problem=self._save())

    async def close(self) -> None:
        """Stop publishing when the deployment is taken down."""
        self._is_closing = True
        self._publishing.cancel()
        await asyncio.gather(self._publishing, return_exceptions=True)
        self._save_if_needed()
        await self._publisher.close()

    async def _publish_forever(self) -> None:
        cleared: KeyRegistry | None = None
        while not self._is_closing:  # redis-py may swallow a cancellation
            published = self.registry if await self._publish() else None
            self._save_if_needed()
            await asyncio.sleep(_PUBLISH_S)
            # After _PUBLISH_S all routers use the published registry.
            if published and published != cleared and await self._clear(published):
                cleared = published

    async def _clear(self, published: KeyRegistry) -> bool:
        """Delete rate-limit counters of keys that no longer exist. Returns False if Redis is unavailable."""
        try:
            await self._publisher.forget_others(
                {key.id for registry in (published, self.registry) for key in registry.keys}
            )
        except RedisError:
            return False
        return True

    async def _publish(self) -> bool:
        try:
            await self._publisher.publish(self.registry)
            self._reach.found()
            return True
        except RedisError as error:
            self._reach.missed(error)
            return False

    def _load(self) -> KeyRegistry:
        """Return the saved registry, or an empty one. Raises DeployError."""
        # Ray's entry is newer than the file, which may be from an earlier deployment.
        stored = store.get(self._space, _ENTRY)
        return read_registry(self._file) if stored is None else KeyRegistry.from_json(stored)

    def _save(self) -> str:
        """Save to both stores. Return what failed and its consequence; empty if both succeeded."""
        problems = []
        try:
            store.put(self._space, _ENTRY, self.registry.to_json())
        except DeployError as error:
            problems.append(f"{error}; until it does, a restarted controller would not have this change")
        try:
            write_whole(self._file, self.registry.to_json())
        except DeployError as error:
            problems.append(
                f"{error}; until this is fixed, the next deployment of this name would not have this change"
            )
        self._problem = "; and ".join(problems)
        return self._problem

    def _save_if_needed(self) -> None:
        if self._problem and not self._save():
            logger.info("API keys saved version=%d", self.registry.version)
