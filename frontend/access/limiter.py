"""Rate limiters: requests and tokens per minute, and concurrent requests, for each API key.

LocalLimiter enforces one router's share of each limit while Redis is unavailable.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from core.types.api_key import ApiKey
from core.types.errors import RateLimited

LEASE_S = 10.0  # a running request counts for this long after its router last renewed it
# In seconds. Counters hold whole seconds, so 61 of them cover any minute. One more, because a request may use the
# tokens that it took ahead up to half a second later.
WINDOW = 62


@dataclass(frozen=True, kw_only=True)
class LimitStatus:
    """Usage of one key at one moment."""

    num_requests: int  # in the window, including this one
    requests_reset_s: float  # until the window is empty
    num_tokens: int
    tokens_reset_s: float

    def headers(self, key: ApiKey) -> dict[str, str]:
        """Return OpenAI's x-ratelimit headers for the limits that the key has."""
        headers = {}
        for kind, limit, used, reset_s in (
            ("requests", key.rpm, self.num_requests, self.requests_reset_s),
            ("tokens", key.tpm, self.num_tokens, self.tokens_reset_s),
        ):
            if limit is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, limit - used))
                headers[f"x-ratelimit-reset-{kind}"] = f"{reset_s:.3f}s"
        return headers


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One request's share of its key's limits: a concurrency slot and tokens (estimated at first)."""

    key: ApiKey
    id: str
    second: int  # of the limiter's clock, when its tokens were taken
    num_tokens: int
    status: LimitStatus

    def with_tokens(self, number: int) -> Reservation:
        """Return the reservation reduced to `number` tokens."""
        left = replace(self.status, num_tokens=self.status.num_tokens - self.num_tokens + number)
        return replace(self, num_tokens=number, status=left)


class Limiter(Protocol):
    """Counts requests and tokens of keys. Methods raise redis.RedisError if the backing Redis is unavailable."""

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        """Take one request and a concurrency slot, before the request's size is known.

        Takes `ahead` tokens as well if the key has twice as many left, so that the next request can do the same. Takes
        nothing and raises RateLimited with a retry time if a limit is reached or no token is left.
        """
        ...

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        """Return the tokens taken ahead, and take `num_tokens` instead. Raises RateLimited; then no tokens are held."""
        ...

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        """Return unused tokens."""
        ...

    async def settle(self, taken: Reservation, *, used: int) -> None:
        """End the request, which has used `used` tokens, and release its slot."""
        ...

    async def renew(self, taken: list[Reservation]) -> None:
        """Extend the leases by LEASE_S, including those that have expired."""
        ...


def rejection(key: ApiKey, kind: str, *, retry_after_s: float, status: LimitStatus) -> RateLimited:
    """Build the RateLimited error. kind: requests, tokens or concurrency."""
    limit = {
        "requests": f"{key.rpm} requests a minute",
        "tokens": f"{key.tpm} tokens a minute",
        "concurrency": f"{key.concurrency} requests at a time",
    }[kind]
    return RateLimited(
        f"API key limit reached: {limit}",
        retry_after_s=retry_after_s,
        headers=status.headers(key),
        is_certain=kind == "requests",  # tokens and slots may be returned earlier
    )


@dataclass
class _Window:
    """Counts of the last minute, by second."""

    counts: dict[int, int] = field(default_factory=dict)  # in order

    def used(self, now: float) -> int:
        for second in [second for second in self.counts if second <= int(now) - WINDOW]:
            del self.counts[second]
        return sum(self.counts.values())

    def add(self, second: int, number: int) -> None:
        self.counts[second] = self.counts.get(second, 0) + number

    def reset_s(self, now: float) -> float:
        """Return the time until the window is empty."""
        return max((second + WINDOW - now for second, count in self.counts.items() if count), default=0.0)

    def room_in_s(self, now: float, *, excess: int) -> float:
        """Return the time until `excess` counts have left the window."""
        for second, count in self.counts.items():
            excess -= count
            if excess <= 0:
                return second + WINDOW - now
        return float(WINDOW)


@dataclass
class _Used:
    requests: _Window = field(default_factory=_Window)
    tokens: _Window = field(default_factory=_Window)
    running: set[str] = field(default_factory=set)

    def status(self, now: float) -> LimitStatus:
        return LimitStatus(
            num_requests=self.requests.used(now),
            requests_reset_s=self.requests.reset_s(now),
            num_tokens=self.tokens.used(now),
            tokens_reset_s=self.tokens.reset_s(now),
        )

    def check(self, part: ApiKey, now: float, *, num_requests: int, num_tokens: int) -> None:
        """Raise RateLimited if the additional requests or tokens exceed a limit."""
        checks = (("requests", part.rpm, self.requests, num_requests), ("tokens", part.tpm, self.tokens, num_tokens))
        for kind, limit, window, amount in checks:
            if limit is not None and amount and (excess := window.used(now) + amount - limit) > 0:
                retry_s = window.room_in_s(now, excess=excess)
                raise rejection(part, kind, retry_after_s=retry_s, status=self.status(now))


class LocalLimiter:
    """Limiter of one of `num_routers` routers, which share each limit equally. Bound to the event loop."""

    def __init__(self, *, num_routers: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._num_routers = num_routers
        self._now = now
        self._used: defaultdict[str, _Used] = defaultdict(_Used)

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        used, now, part = self._used[key.id], self._now(), self._part_of(key)
        used.check(part, now, num_requests=1, num_tokens=1)
        if part.concurrency is not None and len(used.running) >= part.concurrency:
            raise rejection(part, "concurrency", retry_after_s=1.0, status=used.status(now))
        used.requests.add(int(now), 1)
        used.running.add(id)
        if part.tpm is None or used.tokens.used(now) + 2 * ahead > part.tpm:
            ahead = 0
        used.tokens.add(int(now), ahead)
        return Reservation(key=key, id=id, second=int(now), num_tokens=ahead, status=used.status(now))

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        used, now, part = self._used[taken.key.id], self._now(), self._part_of(taken.key)
        await self.give_back(taken, num_tokens=taken.num_tokens)
        num_tokens = num_tokens if part.tpm is None else min(num_tokens, part.tpm)
        used.check(part, now, num_requests=0, num_tokens=max(1, num_tokens))
        used.tokens.add(int(now), num_tokens)
        return replace(taken, second=int(now), num_tokens=num_tokens, status=used.status(now))

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        counted = self._used[taken.key.id].tokens
        if taken.second in counted.counts:
            counted.add(taken.second, -num_tokens)

    async def settle(self, taken: Reservation, *, used: int) -> None:
        self._used[taken.key.id].running.discard(taken.id)
        await self.give_back(taken, num_tokens=taken.num_tokens - used)

    async def renew(self, taken: list[Reservation]) -> None:
        """Do nothing: local reservations end with this process."""

    def _part_of(self, key: ApiKey) -> ApiKey:
        """Return the key with this router's share of each limit."""

        def part(limit: int | None) -> int | None:
            return None if limit is None else max(1, limit // self._num_routers)

        return replace(key, rpm=part(key.rpm), tpm=part(key.tpm), concurrency=part(key.concurrency))
