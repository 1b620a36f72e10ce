"""Async Redis clients that follow a failover, records with leases, repair of keys, and rate-limited logs of outages."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError, ResponseError

logger = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 2.0
_MOST_CONNECTIONS = 64  # per client: a server accepts about 10,000 in total, and more would only queue in Redis
# Age at which a connection is replaced. A DNS name that moves to another server closes no connection, and the old
# server may still answer reads from stale data.
_MAX_AGE_S = 10.0
_LOG_EVERY_S = 10.0  # minimum interval between two lines with different reasons
_QUIET_S = 3.0  # without failures, before Redis counts as back in the log
_MAX_REASON = 200  # characters
_WRONG_TYPE = "WRONGTYPE"


def connect_redis(url: str, *, within_s: float = _REDIS_TIMEOUT_S) -> Redis:
    """Return a client that connects on first use, resolves the name for each connection, and never retries.

    within_s: limit for a response, and for a free connection when many concurrent calls use them all. There are no
    retries, so that the caller notices an outage, after which Redis may be empty. An error response closes the
    connection: the server may be a primary that became a replica (READONLY, MASTERDOWN) or lost its replicas
    (NOREPLICAS), and the next call resolves the name again.
    """
    pool = _Pool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=within_s,
        socket_timeout=within_s,
        socket_connect_timeout=within_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[ResponseError],  # redis-py disconnects on these; with 0 retries it repeats nothing
    )
    return Redis.from_pool(pool)


class _Pool(BlockingConnectionPool):
    """Pool that replaces connections older than _MAX_AGE_S before their next use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made_at: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    async def ensure_connection(self, connection: Any) -> None:
        now = time.monotonic()
        if now - self._made_at.get(connection, now) > _MAX_AGE_S:
            await connection.disconnect()
        if not connection.is_connected:
            self._made_at[connection] = now
        await super().ensure_connection(connection)


@asynccontextmanager
async def repaired(redis: Redis, types: Mapping[str, str]) -> AsyncIterator[None]:
    """Delete keys of a wrong type if a command in the block fails with WRONGTYPE. The error is re-raised.

    types: expected Redis type of each key of the caller. Other writers of this Redis may have replaced them.
    """
    try:
        yield
    except ResponseError as error:
        if _WRONG_TYPE in str(error):
            async with redis.pipeline(transaction=False) as pipeline:
                for key in types:
                    pipeline.type(key)
                found = await pipeline.execute()
            pairs = zip(types.items(), found, strict=True)
            wrong = [key for (key, kind), type_now in pairs if type_now.decode() not in (kind, "none")]
            if wrong:
                await redis.unlink(*wrong)
                logger.warning("deleted keys of another type in Redis keys=%s", ",".join(wrong))
        raise


class LeasedRecords:
    """Records that expire unless their writers renew them. Raises redis.RedisError if Redis is unreachable.

    <names>            set of names
    <record><name>     record of one of them
    """

    def __init__(self, redis: Redis, *, names: str, record: str, lease_s: float) -> None:
        self._redis = redis
        self._names = names
        self._record = record
        self._lease_s = lease_s

    async def renew(self, name: str, record: bytes) -> bool:
        """Write a record with a new lease. Returns False if there was none before: Redis may have lost all its data."""
        place = self._record + name
        async with (
            repaired(self._redis, {place: "string", self._names: "set"}),
            self._redis.pipeline(transaction=False) as pipeline,
        ):
            pipeline.set(place, record, px=int(self._lease_s * 1e3), get=True)
            pipeline.sadd(self._names, name)
            before, _ = await pipeline.execute()
        return before is not None

    async def end(self, name: str) -> None:
        """End a lease at once."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._record + name)
            pipeline.srem(self._names, name)
            await pipeline.execute()

    async def read(self, *, most: int | None = None) -> dict[str, bytes]:
        """Return the unexpired records by name, sorted; only those of the first `most` names. Removes expired names."""
        names = sorted(_text(name) for name in await self._redis.smembers(self._names))[:most]
        if not names:
            return {}
        found = dict(zip(names, await self._redis.mget([self._record + name for name in names]), strict=True))
        if expired := [name for name, record in found.items() if record is None]:
            await self._redis.srem(self._names, *expired)
        return {
            name: record.encode() if isinstance(record, str) else record
            for name, record in found.items()
            if record is not None
        }


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def is_about_one_key(error: RedisError) -> bool:
    """Return whether the error concerns the keys of this call, while Redis itself works."""
    # redis-py drops the code ERR of scripts, but keeps the codes of a server that refuses, such as MISCONF.
    return type(error) is ResponseError and (_WRONG_TYPE in str(error) or not str(error).split(" ")[0].isupper())


def reason_of(error: RedisError) -> str:
    """Return the server's error message, or the client's if no server answered, as one line without the command."""
    # redis-py puts the command in front of the error of a pipeline.
    words = str(error).rpartition(" of pipeline caused error: ")[2].strip("()'\",")
    has_refused = isinstance(error, (ResponseError, BusyLoadingError, AuthenticationError))
    text = "".join(one if one.isprintable() else "?" for one in words)[:_MAX_REASON]
    return f"Redis {'refuses' if has_refused else 'is unreachable'}: {text}"


class RedisReach:
    """Reachability of Redis for one client, derived from its last calls.

    Logs the first failure, each change of the reason, and the recovery, at a bounded rate.
    """

    def __init__(self, meanwhile: str) -> None:
        """meanwhile: short description of the degraded mode, for the log."""
        self._meanwhile = meanwhile
        self._failing: dict[str, str] = {}  # reason by action
        self._logged = ""  # last reason in the log; empty: Redis is back
        self._logged_at = self._missed_at = 0.0

    @property
    def is_unavailable(self) -> bool:
        return bool(self._failing)

    @property
    def problem(self) -> str:
        """Reason of the last failure; empty if every action succeeded last time."""
        return next(reversed(self._failing.values()), "")

    def found(self, action: str = "") -> None:
        """Record a successful call. action: kind of call that may fail while others succeed, such as writes."""
        self._failing.pop(action, None)
        if self._logged and not self._failing and time.monotonic() - self._missed_at >= _QUIET_S:
            logger.info("Redis is reachable again")
            self._logged = ""

    def missed(self, error: RedisError, action: str = "") -> None:
        """Record a failed call."""
        now, reason = time.monotonic(), reason_of(error)
        self._failing.pop(action, None)
        self._failing[action] = reason
        self._missed_at = now
        if reason != self._logged and not (self._logged and now - self._logged_at < _LOG_EVERY_S):
            logger.warning("%s; meanwhile %s", reason, self._meanwhile)
            self._logged, self._logged_at = reason, now
