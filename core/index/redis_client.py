"""Async Redis clients with deadlines, and one-time logging of outages."""

from __future__ import annotations

import logging

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

_REDIS_TIMEOUT_S = 2.0
_MOST_CONNECTIONS = 64  # of one client: a server accepts about 10,000 in total, and more would only queue in Redis


def connect_redis(url: str, *, within_s: float = _REDIS_TIMEOUT_S) -> Redis:
    """Return a client that connects on first use and never retries.

    within_s: limit for an answer, and for a free connection if all are in use: many concurrent calls are no outage.
    Without retries the caller notices an outage, after which Redis may be empty.
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
    """State of Redis as one of its users last saw it. Logs each change once."""

    def __init__(self, meanwhile: str) -> None:
        """meanwhile: short description of the degraded mode, for the log."""
        self._meanwhile = meanwhile
        self.is_unavailable = False

    def found(self) -> None:
        """Record a successful call."""
        if self.is_unavailable:
            logger.info("Redis is reachable again")
        self.is_unavailable = False

    def missed(self, error: RedisError) -> None:
        """Record a failed call."""
        if not self.is_unavailable:
            logger.warning("Redis is unreachable; %s: %s", self._meanwhile, error)
        self.is_unavailable = True
