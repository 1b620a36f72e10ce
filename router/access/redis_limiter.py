"""Limits counted in Redis: exact across all routers, for one round trip before a request, one more before it where
there is a limit of tokens, and one after it.

Of each key there is a hash of what was asked for, by the second, and a sorted set of the requests under way, by the end
of their leases. Neither expires (see cluster/index/key_channel.py): they end with the key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from cluster.index.key_channel import places_of
from cluster.words.api_key import ApiKey
from router.access.limiter import LEASE_S, WINDOW, Reservation, Standing, refusal

_NONE = -1  # no limit of this kind

# The time is Redis's own: routers' clocks may differ.
_TIME = """
local now = tonumber(ARGV[1])
if now < 0 then
    local t = redis.call('TIME')
    now = t[1] * 1000 + math.floor(t[2] / 1000)
end
local second = math.floor(now / 1000)
"""

# KEYS used, running. ARGV now (ms; below 0: Redis's), window (s), lease (ms), id, rpm, tpm, concurrency (each below 0:
# not asked about), requests, tokens. Where tokens are asked about there must be one left, also for who wants none.
# Answers: what refuses it ('' where nothing does), retry (ms), the second, and requests, tokens with their resets (ms).
_TAKE = (
    _TIME
    + """
local window, limits = tonumber(ARGV[2]), {r = tonumber(ARGV[5]), t = tonumber(ARGV[6])}
local wanted, least = {r = tonumber(ARGV[8]), t = tonumber(ARGV[9])}, {r = 0, t = 1}
local sums, counts, seconds = {r = 0, t = 0}, {r = {}, t = {}}, {r = {}, t = {}}
-- What is no count, or of a second that is yet to come (a clock that went back), would count for ever.
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
    local kind, at, count = string.sub(fields[i], 1, 1), tonumber(string.sub(fields[i], 2)), tonumber(fields[i + 1])
    if not (sums[kind] and at and count) or at <= second - window or at > second + 1 then
        redis.call('HDEL', KEYS[1], fields[i])
    else
        sums[kind] = sums[kind] + count
        counts[kind][at] = count
        table.insert(seconds[kind], at)
    end
end
local refused, retry = '', 0
for _, kind in ipairs({'r', 't'}) do
    local excess = sums[kind] + math.max(wanted[kind], least[kind]) - limits[kind]
    if refused == '' and limits[kind] >= 0 and excess > 0 then
        refused, retry = kind, window * 1000
        table.sort(seconds[kind])
        for _, at in ipairs(seconds[kind]) do
            excess = excess - counts[kind][at]
            if excess <= 0 then
                retry = (at + window) * 1000 - now
                break
            end
        end
    end
end
local concurrency = tonumber(ARGV[7])
if refused == '' and concurrency >= 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    redis.call('ZREMRANGEBYSCORE', KEYS[2], now + tonumber(ARGV[3]) + 1000, '+inf')
    if redis.call('ZCARD', KEYS[2]) >= concurrency then
        refused, retry = 'c', 1000
    end
end
if refused == '' then
    for kind, count in pairs(wanted) do
        redis.call('HINCRBY', KEYS[1], kind .. second, count)
        sums[kind] = sums[kind] + count
        if count > 0 then
            counts[kind][second] = (counts[kind][second] or 0) + count
        end
    end
    if concurrency >= 0 then
        redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[4])
    end
end
local resets = {r = 0, t = 0}
for kind, of_seconds in pairs(counts) do
    for at, count in pairs(of_seconds) do
        if count > 0 then
            resets[kind] = math.max(resets[kind], (at + window) * 1000 - now)
        end
    end
end
return {refused, retry, second, sums.r, resets.r, sums.t, resets.t}
"""
)

# KEYS used, running. ARGV id, second, tokens to add or, below 0, to give back.
_SETTLE = """
redis.call('ZREM', KEYS[2], ARGV[1])
local field = 't' .. ARGV[2]
if redis.call('HEXISTS', KEYS[1], field) == 1 then
    redis.call('HINCRBY', KEYS[1], field, ARGV[3])
end
"""

# KEYS running. ARGV now, lease (ms), ids. One whose lease has ended meanwhile comes back.
_RENEW = (
    _TIME
    + """
for i = 3, #ARGV do
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[i])
end
"""
)
_WHAT = {"r": "requests", "t": "tokens", "c": "concurrency"}


class RedisLimiter:
    """Implements Limiter for all routers of the deployment `name`."""

    def __init__(self, redis: Redis, *, name: str, now_ms: Callable[[], int] = lambda: _NONE) -> None:
        """now_ms: a clock in place of Redis's own."""
        self._name = name
        self._now_ms = now_ms
        self._take: Any = redis.register_script(_TAKE)
        self._settle: Any = redis.register_script(_SETTLE)
        self._renew: Any = redis.register_script(_RENEW)

    async def enter(self, key: ApiKey, *, id: str) -> Reservation:
        limits = [_NONE if limit is None else limit for limit in (key.rpm, key.tpm, key.concurrency)]
        return await self._counted(key, id, limits, num_requests=1, num_tokens=0)

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        limits = [_NONE, _NONE if taken.key.tpm is None else taken.key.tpm, _NONE]
        return await self._counted(taken.key, taken.id, limits, num_requests=0, num_tokens=num_tokens)

    async def _counted(
        self, key: ApiKey, id: str, limits: list[int], *, num_requests: int, num_tokens: int
    ) -> Reservation:
        answer = await self._take(
            keys=places_of(self._name, key.id),
            args=[self._now_ms(), WINDOW, round(LEASE_S * 1e3), id, *limits, num_requests, num_tokens],
        )
        refused, retry_ms, second, num_in_window, requests_ms, tokens_in_window, tokens_ms = answer
        standing = Standing(
            num_requests=num_in_window,
            requests_reset_s=requests_ms / 1e3,
            num_tokens=tokens_in_window,
            tokens_reset_s=tokens_ms / 1e3,
        )
        if refused:
            raise refusal(key, _WHAT[refused.decode()], retry_after_s=retry_ms / 1e3, standing=standing)
        return Reservation(key=key, id=id, second=second, num_tokens=num_tokens, standing=standing)

    async def settle(self, taken: Reservation, *, used: int) -> None:
        places = places_of(self._name, taken.key.id)
        await self._settle(keys=places, args=[taken.id, taken.second, used - taken.num_tokens])

    async def renew(self, taken: list[Reservation]) -> None:
        of_key: defaultdict[str, list[str]] = defaultdict(list)
        for one in taken:
            if one.key.concurrency is not None:
                of_key[one.key.id].append(one.id)
        failed: ResponseError | None = None
        for key_id, ids in of_key.items():
            _, running = places_of(self._name, key_id)
            try:
                await self._renew(keys=[running], args=[self._now_ms(), round(LEASE_S * 1e3), *ids])
            except ResponseError as error:  # of this key's: the others' go on
                failed = error
        if failed:
            raise failed
