"""Redis limiter: exact across all routers, at one round trip per request.

Before a request, one call takes its slot and an estimate of its tokens; a second call takes more if those are too few.
After the request, its slot is returned at once in the background. Its unused tokens go with the key's next call from
this router, or after a moment by themselves.

Each key has a hash of counts by second, and a sorted set of running requests scored by lease expiry. Neither expires
(see core/index/key_channel.py): they are deleted with the key.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from core.index.key_channel import places_of
from core.index.redis_client import repaired
from core.types.api_key import ApiKey
from frontend.access.limiter import LEASE_S, WINDOW, LimitStatus, Reservation, rejection

_NONE = -1  # no limit
_DELAY_S = 0.05  # maximum time that returned tokens wait for the key's next call

# The clock is Redis's own, because routers' clocks may differ.
_TIME = """
local now = tonumber(ARGV[1])
if now < 0 then
    local t = redis.call('TIME')
    now = t[1] * 1000 + math.floor(t[2] / 1000)
end
local second = math.floor(now / 1000)
"""

# KEYS used, running. ARGV ends in triples: id of an ended request or '', second, tokens to add (negative: to return).
_PAY = """
for i = first, #ARGV, 3 do
    if ARGV[i] ~= '' then
        redis.call('ZREM', KEYS[2], ARGV[i])
    end
    local field = 't' .. ARGV[i + 1]
    if redis.call('HEXISTS', KEYS[1], field) == 1 then
        redis.call('HINCRBY', KEYS[1], field, ARGV[i + 2])
    end
end
"""
_SETTLE = "local first = 1\n" + _PAY

# KEYS used, running. ARGV now (ms; negative: Redis's clock), window (s), lease (ms), id, rpm, tpm, concurrency (each
# negative: unlimited), requests, tokens, tokens ahead, then the triples of _PAY. With a token limit, one token must be
# left even if the request takes none.
# Returns the exceeded limit ('' if none), retry (ms), the second, tokens taken, then requests in the window and their
# reset (ms), and tokens in the window and their reset (ms).
_TAKE = (
    _TIME
    + "local first = 11\n"
    + _PAY
    + """
local window, limits = tonumber(ARGV[2]), {r = tonumber(ARGV[5]), t = tonumber(ARGV[6])}
local wanted, least = {r = tonumber(ARGV[8]), t = tonumber(ARGV[9])}, {r = 0, t = 1}
local sums, counts, seconds = {r = 0, t = 0}, {r = {}, t = {}}, {r = {}, t = {}}
-- Malformed counts, and counts of future seconds (the clock went back), would never expire.
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
local exceeded, retry = '', 0
for _, kind in ipairs({'r', 't'}) do
    local excess = sums[kind] + math.max(wanted[kind], least[kind]) - limits[kind]
    if exceeded == '' and limits[kind] >= 0 and excess > 0 then
        exceeded, retry = kind, window * 1000
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
if exceeded == '' and concurrency >= 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    redis.call('ZREMRANGEBYSCORE', KEYS[2], now + tonumber(ARGV[3]) + 1000, '+inf')
    if redis.call('ZCARD', KEYS[2]) >= concurrency then
        exceeded, retry = 'c', 1000
    end
end
if exceeded == '' then
    local ahead = tonumber(ARGV[10])
    if limits.t >= 0 and sums.t + 2 * ahead <= limits.t then
        wanted.t = wanted.t + ahead
    end
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
return {exceeded, retry, second, wanted.t, sums.r, resets.r, sums.t, resets.t}
"""
)

# KEYS running. ARGV now, lease (ms), ids. An expired lease is restored.
_RENEW = (
    _TIME
    + """
for i = 3, #ARGV do
    redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[i])
end
"""
)
_KINDS = {"r": "requests", "t": "tokens", "c": "concurrency"}


class RedisLimiter:
    """Implements Limiter for all routers of the deployment `name`."""

    def __init__(
        self, redis: Redis, *, name: str, now_ms: Callable[[], int] = lambda: _NONE, delay_s: float = _DELAY_S
    ) -> None:
        """now_ms: clock to use in place of Redis's. delay_s: how long returned tokens wait for the key's next call."""
        self._redis = redis
        self._name = name
        self._delay_s = delay_s
        self._now_ms = now_ms
        self._returns: defaultdict[str, list[str | int]] = defaultdict(list)  # by key: triples of _PAY
        self._take: Any = redis.register_script(_TAKE)
        self._settle: Any = redis.register_script(_SETTLE)
        self._renew: Any = redis.register_script(_RENEW)

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        limits = [_NONE if limit is None else limit for limit in (key.rpm, key.tpm, key.concurrency)]
        return await self._counted(key, id, [*limits, 1, 0, ahead])

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        self._queue_return(taken, "", -taken.num_tokens)
        limits = [_NONE, _NONE if taken.key.tpm is None else taken.key.tpm, _NONE]
        return await self._counted(taken.key, taken.id, [*limits, 0, num_tokens, 0])

    async def _counted(self, key: ApiKey, id: str, amounts: list[int]) -> Reservation:
        args = [self._now_ms(), WINDOW, round(LEASE_S * 1e3), id, *amounts, *self._returns.pop(key.id, [])]
        used, running = places = places_of(self._name, key.id)
        async with repaired(self._redis, {used: "hash", running: "zset"}):
            answer = await self._take(keys=places, args=args)
        rejected, retry_ms, second, num_tokens, num_in_window, requests_ms, tokens_in_window, tokens_ms = answer
        status = LimitStatus(
            num_requests=num_in_window,
            requests_reset_s=requests_ms / 1e3,
            num_tokens=tokens_in_window,
            tokens_reset_s=tokens_ms / 1e3,
        )
        if rejected:
            raise rejection(key, _KINDS[rejected.decode()], retry_after_s=retry_ms / 1e3, status=status)
        return Reservation(key=key, id=id, second=second, num_tokens=num_tokens, status=status)

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        self._queue_return(taken, "", -num_tokens)
        await self._send_returns(taken.key, after_s=self._delay_s)

    async def settle(self, taken: Reservation, *, used: int) -> None:
        has_place = taken.key.concurrency is not None
        self._queue_return(taken, taken.id if has_place else "", used - taken.num_tokens)
        await self._send_returns(taken.key, after_s=0 if has_place else self._delay_s)

    def _queue_return(self, taken: Reservation, id: str, num_tokens: int) -> None:
        if id or (num_tokens and taken.key.tpm is not None):
            self._returns[taken.key.id] += [id, taken.second, num_tokens]

    async def _send_returns(self, key: ApiKey, *, after_s: float) -> None:
        """Send the key's triples after `after_s`, unless another call carries them first."""
        if after_s and key.id in self._returns:
            await asyncio.sleep(after_s)
        if returns := self._returns.pop(key.id, None):
            await self._settle(keys=places_of(self._name, key.id), args=returns)

    async def renew(self, taken: list[Reservation]) -> None:
        ids_of_key: defaultdict[str, list[str]] = defaultdict(list)
        for one in taken:
            if one.key.concurrency is not None:
                ids_of_key[one.key.id].append(one.id)
        failed: ResponseError | None = None
        for key_id, ids in ids_of_key.items():
            _, running = places_of(self._name, key_id)
            try:
                await self._renew(keys=[running], args=[self._now_ms(), round(LEASE_S * 1e3), *ids])
            except ResponseError as error:  # affects this key alone
                failed = error
        if failed:
            raise failed
