"""Interface of rate limiters: requests and tokens per minute, and concurrent requests, for each API key."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from core.types.api_key import ApiKey
from core.types.errors import RateLimited

LEASE_S = 10.0  # a running request counts for this long after its router last renewed it
# In seconds. Counters hold whole seconds, so 61 of them cover any minute; one more, because a request may use tokens
# taken ahead up to half a second later.
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
    """Share of a key's limits held by one request: a concurrency slot, tokens taken ahead, later its token bound."""

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

        Takes `ahead` tokens as well if the key has twice as many left, so that the next request can do the same. Raises
        RateLimited with a retry time, also if the key has no token left; then it takes nothing.
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
