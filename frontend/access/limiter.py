"""What a key may still ask for: requests and tokens in any minute, and requests at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from core.types.api_key import ApiKey
from core.types.errors import RateLimited

LEASE_S = 10.0  # a request under way counts for so long after its router was last heard of
# Seconds are counted whole: so many of them cover any minute, wherever in a second it begins; and one more, for tokens
# that were taken ahead may be used a little later.
WINDOW = 62


@dataclass(frozen=True, kw_only=True)
class LimitStatus:
    """How much of its limits one key has used, at one moment."""

    num_requests: int  # in the window, with this one
    requests_reset_s: float  # until none of them counts any more
    num_tokens: int
    tokens_reset_s: float

    def headers(self, key: ApiKey) -> dict[str, str]:
        """As OpenAI has them; of the limits that the key has."""
        found = {}
        for what, limit, used, reset_s in (
            ("requests", key.rpm, self.num_requests, self.requests_reset_s),
            ("tokens", key.tpm, self.num_tokens, self.tokens_reset_s),
        ):
            if limit is not None:
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, limit - used))
                found[f"x-ratelimit-reset-{what}"] = f"{reset_s:.3f}s"
        return found


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What one request has taken of its key's limits: a place, tokens ahead, and later all that it might use."""

    key: ApiKey
    id: str
    second: int  # of the limiter's clock, in which its tokens were taken
    num_tokens: int
    standing: LimitStatus

    def with_tokens(self, number: int) -> Reservation:
        """With so many of those that it has: the others are given back."""
        left = replace(self.standing, num_tokens=self.standing.num_tokens - self.num_tokens + number)
        return replace(self, num_tokens=number, standing=left)


class Limiter(Protocol):
    """Counts for keys. Raises redis.RedisError where it counts in a Redis that is away."""

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        """Take a request and its place, or nothing; of what it asks for nothing is known yet. With it so many tokens
        `ahead`, where the key has twice as many left: who comes after it still finds as many. Raises RateLimited, which
        says when to come again, also where the key has no token left."""
        ...

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        """Take the tokens of a request that has a place, in exchange for those that it took ahead, which are given back
        whatever comes of it; or none of them. Raises RateLimited."""
        ...

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        """So many of the tokens taken are not needed."""
        ...

    async def settle(self, taken: Reservation, *, used: int) -> None:
        """The request is over, and has used so many tokens."""
        ...

    async def renew(self, taken: list[Reservation]) -> None:
        """These are still under way: for another LEASE_S, also where their leases have ended."""
        ...


def rejection(key: ApiKey, what: str, *, retry_after_s: float, standing: LimitStatus) -> RateLimited:
    """what: requests, tokens or concurrency."""
    limit = {
        "requests": f"{key.rpm} requests a minute",
        "tokens": f"{key.tpm} tokens a minute",
        "concurrency": f"{key.concurrency} requests at a time",
    }[what]
    return RateLimited(
        f"this API key may have {limit}",
        retry_after_s=retry_after_s,
        headers=standing.headers(key),
        is_certain=what == "requests",  # tokens and places may be given back
    )
