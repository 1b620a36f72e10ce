"""A key's limits around a request: taken before anything of it is read, settled after it, and kept meanwhile."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError, ResponseError

from cluster.index.redis_client import RedisReach
from cluster.words.api_key import ApiKey
from cluster.words.errors import ClusterError, RateLimited
from router.access.client import Client
from router.access.limiter import LEASE_S, Limiter, Reservation
from router.access.visit import Held, Visit

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0  # after Redis was found to be away


class Limits:
    """Lives on the router's event loop. Where Redis is away, or too slow, this router's own part of each limit counts:
    what was counted on the other side is not carried over."""

    def __init__(self, shared: Limiter | None, local: Limiter, *, try_again_s: float = _TRY_AGAIN_S) -> None:
        """shared: of all routers; None where there is none. try_again_s: after `shared` was found to be away."""
        self._try_again_s = try_again_s
        self._shared = shared
        self._local = local
        self._under_way: dict[str, Held] = {}  # their places
        self._settling: set[asyncio.Task[None]] = set()
        self._away_until = 0.0
        self._reach = RedisReach("this router's own part of each limit counts")
        self._has_failed = False  # for one key: Redis is there
        self._is_closing = False
        self._used_up: dict[str, tuple[float, RateLimited]] = {}  # by key: until when nothing can pass, and why

    @asynccontextmanager
    async def entered(self, client: Client) -> AsyncIterator[Visit]:
        """Hold a place for one request of this client for as long as the block lasts, from before its body is read.

        It counts as a request, whatever becomes of it. Raises RateLimited, also where the key has no token left.
        """
        key = client.key
        if key is None or not key.is_limited:
            yield Visit(None, self._charge)
            return
        self._check(key)
        visit = Visit(place := await self._reserve(key), self._charge)
        self._under_way[place[1].id] = place
        try:
            yield visit
        finally:
            del self._under_way[place[1].id]
            self._start(self._leave(visit, place, visit.used_tokens))

    async def keep_forever(self) -> None:
        """Renew what is under way: the places of a router that dies come back when their leases end."""
        while not self._is_closing:  # redis-py may swallow a cancellation
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._renew()
            except RedisError as error:
                self._note(error)

    def close(self) -> None:
        """Keep no longer."""
        self._is_closing = True

    async def settled(self) -> None:
        """Wait until what is over has been settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def _check(self, key: ApiKey) -> None:
        """Raises RateLimited where it is known already that nothing passes: nobody is asked then."""
        if found := self._used_up.get(key.id):
            until, error = found
            if (left_s := until - time.monotonic()) > 0:
                raise RateLimited(str(error), retry_after_s=left_s, headers=error.headers)
            del self._used_up[key.id]

    async def _reserve(self, key: ApiKey) -> Held:
        entering = asyncio.create_task(self._enter(key))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:  # the client has gone, and Redis may have counted it
            self._start(self._give_back(entering))
            raise
        except RateLimited as error:
            if error.is_certain and self._asks_shared:
                self._used_up[key.id] = time.monotonic() + error.retry_after_s, error
            raise

    async def _enter(self, key: ApiKey) -> Held:
        id = secrets.token_hex(8)
        if self._shared is not None and self._asks_shared:
            try:
                if self._reach.is_away:  # leases have ended meanwhile, and what runs still counts
                    await self._renew()
                taken = await self._shared.enter(key, id=id)
                self._reach.found()
                return self._shared, taken
            except RedisError as error:
                self._note(error)
        return self._local, await self._local.enter(key, id=id)

    async def _charge(self, place: Held, num_tokens: int) -> Held:
        limiter, taken = place
        try:
            return limiter, await limiter.charge(taken, num_tokens=num_tokens)
        except RedisError as error:
            self._note(error)
        return self._local, await self._local.charge(taken, num_tokens=num_tokens)

    async def _leave(self, visit: Visit, place: Held, used: int) -> None:
        held = place
        if visit.charging:
            with suppress(ClusterError):  # it was told so
                held = await visit.charging
        if held[0] is not place[0]:
            await self._settle(*place, 0)
        await self._settle(*held, used if held is not place else 0)

    @property
    def _asks_shared(self) -> bool:
        return self._shared is not None and time.monotonic() >= self._away_until

    async def _settle(self, limiter: Limiter, taken: Reservation, used: int) -> None:
        try:
            await limiter.settle(taken, used=used)
        except RedisError as error:
            self._note(error)

    async def _renew(self) -> None:
        kept = [taken for limiter, taken in self._under_way.values() if limiter is self._shared]
        if self._shared is None or not kept:
            return
        await self._shared.renew(kept)
        for taken in kept:
            if taken.id not in self._under_way:  # over while it was being renewed, which may have come last
                await self._shared.settle(taken, used=taken.num_tokens)

    async def _give_back(self, entering: asyncio.Task[Held]) -> None:
        with suppress(ClusterError):
            await self._settle(*await entering, 0)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it: the client has its answer."""
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _note(self, error: RedisError) -> None:
        if isinstance(error, ResponseError):  # it is there, and cannot count this: no reason to pass over other keys
            if not self._has_failed:
                logger.warning("Redis does not count for a key; this router's own part of its limits does: %s", error)
            self._has_failed = True
            return
        self._reach.missed(error)
        self._away_until = time.monotonic() + self._try_again_s
