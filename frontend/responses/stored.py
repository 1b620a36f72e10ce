"""Stored responses of a router, including its behaviour while the store is unavailable."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisUnreachable
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from core.index.redis_client import RedisReach, connect_redis
from core.types.errors import CapacityError, StoreUnavailable, UnknownResponse
from frontend.http.body import ByteBudget
from frontend.responses.store import SMALL_BYTES, RedisResponses, ResponseStore, StoreBounds

T = TypeVar("T")

_WITHIN_S = 1.0  # Redis timeout of a call for which a request waits
_LARGE_WITHIN_S = 5.0  # timeout for large values, during which the event loop may be busy
_TRY_AGAIN_S = 1.0  # after a failure, calls fail at once for this long
_MAX_HELD = 128 * 2**20  # bytes of large values in memory
_MAX_ID = 64  # characters of an id in an error message


class StoredResponses:
    """Stored responses, isolated by tenant. Bound to the router's event loop."""

    def __init__(
        self, store: ResponseStore | None, bounds: StoreBounds, *redises: Redis, try_again_s: float = _TRY_AGAIN_S
    ) -> None:
        """store: None: nothing is stored. redises: closed with this object."""
        self._store = store
        self._bounds = bounds
        self._redises = redises
        self._try_again_s = try_again_s
        self._reach = RedisReach("responses are not stored")
        self._unavailable_until = 0.0
        self._held = ByteBudget(_MAX_HELD, "responses")
        self._transfers = LargeTransfers()

    @classmethod
    def in_redis(cls, url: str, *, name: str, key: bytes, bounds: StoreBounds) -> StoredResponses:
        """Create storage shared by all routers of the deployment `name`; disabled if `bounds.max_bytes` is 0."""
        if not bounds.max_bytes:
            return cls(None, bounds)
        redis, large = connect_redis(url, within_s=_WITHIN_S), connect_redis(url, within_s=_LARGE_WITHIN_S)
        return cls(RedisResponses(redis, bounds, name=name, key=key, large=large), bounds, redis, large)

    @property
    def stores(self) -> bool:
        return self._store is not None

    async def put(self, tenant: str, id: str, value: bytes) -> bool:
        """Store a response. Return False if it is too large, the store is unavailable, or too many are being stored."""
        if self._store is None or not self._bounds.takes(value):
            return False
        store = self._store
        try:
            if len(value) <= SMALL_BYTES:
                await self._call(lambda: store.put(tenant, id, value))
            else:
                async with self._transfers.turn(tenant):
                    await self._call(lambda: store.put(tenant, id, value), is_large=True)
        except (StoreUnavailable, CapacityError):
            return False
        return True

    async def get(self, tenant: str, id: str, held: ExitStack, *, param: str | None = None) -> bytes:
        """Return a stored response. held: reserves the memory of a large value until closed. param: field with the id.
        Raises UnknownResponse, StoreUnavailable, and CapacityError if too many large values are held."""
        store, value = self._store, None
        if store:
            value = await self._call(lambda: store.look(tenant, id))
        if store and isinstance(value, int):
            held.enter_context(self._held.reserved(tenant, value))
            async with self._transfers.turn(tenant):
                value = await self._call(lambda: store.get(tenant, id), is_large=True)
        if not isinstance(value, bytes):
            raise self._unknown(id, param)
        return value

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a response. Raises UnknownResponse, StoreUnavailable."""
        store = self._store
        if store is None or not await self._call(lambda: store.delete(tenant, id)):
            raise self._unknown(id, None)

    async def close(self) -> None:
        for redis in self._redises:
            await redis.aclose()

    def _unknown(self, id: str, param: str | None) -> UnknownResponse:
        why = "" if self._store else "; this router stores no responses (router.stored_responses_mib)"
        return UnknownResponse(f"{param or 'response'}: response {id[:_MAX_ID]!r} not found{why}", param=param)

    async def _call(self, call: Callable[[], Awaitable[T]], *, is_large: bool = False) -> T:
        """Call the store. Raises StoreUnavailable within a second or two, or a few more for a large value. A timeout of
        a large value does not mark the store as unavailable."""
        if time.monotonic() >= self._unavailable_until:
            try:
                answer = await call()
            except RedisError as error:
                if not (is_large and isinstance(error, RedisTimeout)):
                    self._reach.missed(error)
                    if isinstance(error, (RedisUnreachable, RedisTimeout)):
                        self._unavailable_until = time.monotonic() + self._try_again_s
            else:
                self._reach.found()
                return answer
        raise StoreUnavailable("the response store is unavailable; retry in a moment")


_AT_A_TIME, _OF_TENANT = 4, 2
_SLOT_WITHIN_S = 5.0


class LargeTransfers:
    """Limit on concurrent transfers of large values to and from Redis, because they delay its smaller replies.

    Applies in all and per tenant. Bound to the event loop of one router.
    """

    def __init__(self, *, within_s: float = _SLOT_WITHIN_S) -> None:
        self._within_s = within_s
        self._all = asyncio.Semaphore(_AT_A_TIME)
        self._of_tenant: dict[str, asyncio.Semaphore] = {}
        self._num_there: Counter[str] = Counter()  # transfers waiting or running, by tenant

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a transfer slot for the duration of the block. Raises CapacityError if none becomes free in time."""
        own = self._of_tenant.setdefault(tenant, asyncio.Semaphore(_OF_TENANT))
        self._num_there[tenant] += 1
        try:
            async with asyncio.timeout(self._within_s) as waiting, own, self._all:
                waiting.reschedule(None)
                yield
        except TimeoutError:
            if not waiting.expired():
                raise
            raise CapacityError("too many large responses are being read; retry", retry_after_s=1.0) from None
        finally:
            self._num_there[tenant] -= 1
            if not self._num_there[tenant]:
                del self._num_there[tenant], self._of_tenant[tenant]
