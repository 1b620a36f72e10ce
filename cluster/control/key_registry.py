"""The API keys of a deployment: kept by its controller, and made known to its routers.

They are kept in Ray's own store, and in a file that outlives it: on the head, beside the deployment's logs, readable by
its owner only. So a deployment that is taken down and comes back knows the keys that its clients have. Redis only
carries them: what it loses or forgets is told again. Nowhere is a secret, only digests.

A key counts once it is saved: nobody is given one that would be forgotten. A revoked one is refused first and saved
then: no full disk lets anybody in.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from redis.exceptions import RedisError

from cluster.control.desired_state import namespace
from cluster.ray.store import StoreEntry
from core.identity.deployment_secrets import Purpose
from core.index.key_channel import KeyPublisher
from core.index.redis_client import RedisReach, connect_redis
from core.process.atomic_file import write_whole
from core.process.supervisor import Supervisor
from core.types.api_key import ApiKey, KeyChange, KeyRegistry
from core.types.errors import DeployError, SpecError
from core.types.launch import Launch

logger = logging.getLogger(__name__)

_FILE = "keys.json"
_TELL_S = 1.0


def key_file(log_dir: str) -> Path:
    """On the head; log_dir: of the deployment."""
    return Path(log_dir).parent / _FILE


def read_registry(file: Path) -> KeyRegistry:
    """What a key file holds; an empty book where there is no such file. Raises DeployError where it cannot be read:
    an empty book in its place would lock all clients out, and be written over it."""
    try:
        return KeyRegistry.from_json(file.read_bytes())
    except FileNotFoundError:
        return KeyRegistry()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no book of API keys"
        raise DeployError(
            f"{file}: {why}; put back a copy of it, or delete it and make new keys for all clients"
        ) from None


class KeyKeeper:
    """Owned by the controller, on its event loop."""

    def __init__(self, launch: Launch) -> None:
        name, credentials = launch.spec.name, launch.credentials
        self._endpoints = launch.spec.router.endpoints  # of another deployment
        self._file = key_file(launch.log_dir)
        self._entry = _entry(name)
        self.registry = self._load()
        self._problem = ""  # of saving it
        if self.registry.version and self._save():  # either place may have lost them: a head with a new disk, the file
            logger.warning("%s", self._problem)
        self._publisher = KeyPublisher(
            connect_redis(credentials.index_url), name=name, signing_key=credentials.key(Purpose.API_KEYS)
        )
        self._reach = RedisReach("routers hear of the API keys when it is back")
        self._is_closing = False
        self._telling = Supervisor().start("telling routers the keys", self._report_forever)

    async def add(self, key: ApiKey) -> KeyChange:
        """Routers take it within a second of being told. Raises SpecError when its name is taken, and DeployError when
        it cannot be saved: then nothing has changed."""
        if self._endpoints:
            raise SpecError(f"its doors are those of {self._endpoints}, whose keys count: add --name {self._endpoints}")
        registry = self.registry.with_key(key)
        try:
            write_whole(self._file, registry.to_json())
            self._entry.put(registry.to_json())
        except DeployError as error:
            with suppress(DeployError):
                write_whole(self._file, self.registry.to_json())
            raise DeployError(f"the key is not made: {error}") from error
        self.registry = registry
        return KeyChange(key=key, is_told=await self._tell())

    async def revoke(self, key: ApiKey) -> KeyChange:
        """Routers refuse it within a second of being told, also where that cannot be saved. Does nothing where it is
        revoked already: Ray asks a controller that comes back once more what it was asked when it died."""
        self.registry = self.registry.without(key)
        is_told = await self._tell()
        return KeyChange(key=key, is_told=is_told, problem=self._save())

    async def close(self) -> None:
        """The deployment is taken down."""
        self._is_closing = True
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        self._save_if_needed()
        await self._publisher.close()

    async def _report_forever(self) -> None:
        cleared: KeyRegistry | None = None
        while not self._is_closing:  # redis-py may swallow a cancellation
            told = self.registry if await self._tell() else None
            self._save_if_needed()
            await asyncio.sleep(_TELL_S)
            if told and told != cleared and await self._clear(told):  # by now no router counts for other keys
                cleared = told

    async def _clear(self, told: KeyRegistry) -> bool:
        """Forget what was counted for keys that are no more; False: Redis is away."""
        try:
            await self._publisher.forget_others({key.id for registry in (told, self.registry) for key in registry.keys})
        except RedisError:
            return False
        return True

    async def _tell(self) -> bool:
        try:
            await self._publisher.publish(self.registry)
            self._reach.found()
            return True
        except RedisError as error:
            self._reach.missed(error)
            return False

    def _load(self) -> KeyRegistry:
        """What was saved last; an empty book where nothing ever was. Raises DeployError."""
        stored = self._entry.get()  # newer than the file, where there is one: the file is of an earlier deployment
        return read_registry(self._file) if stored is None else KeyRegistry.from_json(stored)

    def _save(self) -> str:
        """What is not saved yet, and what follows from that; empty: all is."""
        problems = []
        try:
            self._entry.put(self.registry.to_json())
        except DeployError as error:
            problems.append(f"{error}; until it does, a controller that restarts would not know of it")
        try:
            write_whole(self._file, self.registry.to_json())
        except DeployError as error:
            problems.append(f"{error}; until that is mended, the next deployment of this name would not know of it")
        self._problem = "; and ".join(problems)
        return self._problem

    def _save_if_needed(self) -> None:
        if self._problem and not self._save():
            logger.info("the API keys are saved, version %d", self.registry.version)


def forget(name: str) -> None:
    """What Ray's store has; the file stays."""
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry("keys", namespace=namespace(name))
