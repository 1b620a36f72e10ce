"""The API keys of a deployment: kept by its controller, and made known to its routers.

They are kept in Ray's own store, and in a file that outlives it: on the head, beside the deployment's logs, readable by
its owner only. So a deployment that is taken down and comes back knows the keys that its clients have. Redis only
carries them: what it loses or forgets is told again. Nowhere is a secret, only digests.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from redis.exceptions import RedisError

from cluster.control.desired import namespace
from cluster.control.ray_store import StoreEntry
from cluster.index.key_channel import KeyPublisher
from cluster.index.redis_client import RedisReach, connect_redis
from cluster.words.api_key import ApiKey, KeyBook, KeyChange
from cluster.words.credentials import Purpose
from cluster.words.launch import Launch

_FILE = "keys.json"
_TELL_S = 1.0


def key_file(log_dir: str) -> Path:
    """On the head; log_dir: of the deployment."""
    return Path(log_dir).parent / _FILE


class KeyKeeper:
    """Owned by the controller, on its event loop."""

    def __init__(self, launch: Launch) -> None:
        name, credentials = launch.spec.name, launch.credentials
        self._file = key_file(launch.log_dir)
        self._entry = StoreEntry("keys", namespace=namespace(name))
        self.book = self._load()
        self._publisher = KeyPublisher(
            connect_redis(credentials.index_url), name=name, seal_key=credentials.key(Purpose.API_KEYS)
        )
        self._reach = RedisReach("routers hear of the API keys when it is back")
        self._is_closing = False
        self._telling = asyncio.create_task(self._tell_forever())

    async def add(self, key: ApiKey) -> KeyChange:
        """Routers take it within a second of being told. Raises SpecError when its name is taken."""
        self._save(self.book.with_key(key))
        return KeyChange(key=key, is_told=await self._tell())

    async def revoke(self, name: str) -> KeyChange:
        """Routers refuse it within a second of being told. Raises SpecError when there is none of this name."""
        book, key = self.book.without(name)
        self._save(book)
        return KeyChange(key=key, is_told=await self._tell())

    async def close(self) -> None:
        """The deployment is taken down; the file stays."""
        self._is_closing = True
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        await self._publisher.close()
        self._entry.delete()

    async def _tell_forever(self) -> None:
        cleared: KeyBook | None = None
        while not self._is_closing:  # redis-py may swallow a cancellation
            told = self.book if await self._tell() else None
            await asyncio.sleep(_TELL_S)
            if told and told != cleared and await self._clear(told):  # by now no router counts for other keys
                cleared = told

    async def _clear(self, told: KeyBook) -> bool:
        """Forget what was counted for keys that are no more; False: Redis is away."""
        try:
            await self._publisher.forget_others({key.id for book in (told, self.book) for key in book.keys})
        except RedisError:
            return False
        return True

    async def _tell(self) -> bool:
        try:
            await self._publisher.publish(self.book)
            self._reach.found()
            return True
        except RedisError as error:
            self._reach.missed(error)
            return False

    def _load(self) -> KeyBook:
        """What was saved last; an empty book where nothing ever was."""
        stored = self._entry.get()
        if stored is None and self._file.exists():
            stored = self._file.read_bytes()
        return KeyBook.from_json(stored) if stored else KeyBook()

    def _save(self, book: KeyBook) -> None:
        self._entry.put(book.to_json())
        new = self._file.with_suffix(f".{os.getpid()}")
        new.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new.touch(mode=0o600)
        new.write_text(book.to_json())
        new.replace(self._file)
        self.book = book
