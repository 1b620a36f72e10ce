"""Clients of the deployment's Redis, and what becomes of whoever uses one while Redis is away."""

from __future__ import annotations

import logging

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 2.0
_MOST_CONNECTIONS = 64  # of one client: more would only wait in Redis, and a server has some 10,000 for everybody


def connect_redis(url: str, *, within_s: float = _REDIS_TIMEOUT_S) -> Redis:
    """A client with deadlines: within_s of an answer, and as long for a connection where all are in use: that many ask
    at once is no sign that Redis is away. It connects on first use.

    It tries nothing twice: whoever uses it must know that Redis was away, for it may have come back empty.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_MOST_CONNECTIONS,
        timeout=within_s,
        socket_timeout=within_s,
        socket_connect_timeout=within_s,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


class RedisReach:
    """Whether Redis was there when one user of it last asked. The log hears of each change once."""

    def __init__(self, meanwhile: str) -> None:
        """meanwhile: what goes on without it, in a few words."""
        self._meanwhile = meanwhile
        self.is_unavailable = False

    def found(self) -> None:
        """It has answered."""
        if self.is_unavailable:
            logger.info("Redis is back")
        self.is_unavailable = False

    def missed(self, error: RedisError) -> None:
        """It has not."""
        if not self.is_unavailable:
            logger.warning("Redis is away; %s: %s", self._meanwhile, error)
        self.is_unavailable = True
