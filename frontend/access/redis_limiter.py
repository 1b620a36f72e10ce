"""Limits counted in Redis: exact across all routers, for one round trip of a request.

before a request   one takes its place, and tokens ahead; another takes its tokens where those are too few
after it           a place is given back at once, which nobody waits for. Tokens go along with the key's next trip from
                   here, or go alone after a moment; a key that has neither limit needs no more

Of each key there is a hash of what was asked for, by the second, and a sorted set of the requests under way, by the end
of their leases. Neither expires (see core/index/key_channel.py): they end with the key.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from core.index.key_channel import places_of
from core.types.api_key import ApiKey
from frontend.access.limiter import LEASE_S, WINDOW, LimitStatus, Reservation, rejection

_NONE = -1  # no limit of this kind
_RIDE_S = 0.05  # that what is given back may wait for a trip of its key's

# The time is Redis's own: routers' clocks may differ.
_TIME = """
local now = tonumber(ARGV[1])
if now < 0 then
    local t = redis.call('TIME')
    now = t[1] * 1000 + math.floor(t[2] / 1000)
end
local second = math.floor(now / 1000)
"""

# KEYS used, running. The last of ARGV, by threes: id of what is over, or '', second, tokens to add or, below 0, to give
# back.
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

# KEYS used, running. ARGV now (ms; below 0: Redis's), window (s), lease (ms), id, rpm, tpm, concurrency (each below 0:
# not asked about), requests, tokens, tokens ahead, and what _PAY takes. Where tokens are asked about there must be one
# left, also for who wants none.
# Answers: what refuses it ('' where nothing does), retry (ms), the second, tokens taken, and requests, tokens in the
# window with their resets (ms).
_TAKE = (
    _TIME
    + "local first = 11\n"
    + _PAY
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
return {refused, retry, second, wanted.t, sums.r, resets.r, sums.t, resets.t}
"""
)

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

    def __init__(
        self, redis: Redis, *, name: str, now_ms: Callable[[], int] = lambda: _NONE, ride_s: float = _RIDE_S
    ) -> None:
        """now_ms: a clock in place of Redis's own. ride_s: for how long tokens that are given back wait for a trip."""
        self._name = name
        self._ride_s = ride_s
        self._now_ms = now_ms
        self._owed: defaultdict[str, list[str | int]] = defaultdict(list)  # by key: what _PAY takes
        self._take: Any = redis.register_script(_TAKE)
        self._settle: Any = redis.register_script(_SETTLE)
        self._renew: Any = redis.register_script(_RENEW)

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        limits = [_NONE if limit is None else limit for limit in (key.rpm, key.tpm, key.concurrency)]
        return await self._counted(key, id, [*limits, 1, 0, ahead])

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        self._owe(taken, "", -taken.num_tokens)
        limits = [_NONE, _NONE if taken.key.tpm is None else taken.key.tpm, _NONE]
        return await self._counted(taken.key, taken.id, [*limits, 0, num_tokens, 0])

    async def _counted(self, key: ApiKey, id: str, asked: list[int]) -> Reservation:
        answer = await self._take(
            keys=places_of(self._name, key.id),
            args=[self._now_ms(), WINDOW, round(LEASE_S * 1e3), id, *asked, *self._owed.pop(key.id, [])],
        )
        rejected, retry_ms, second, num_tokens, num_in_window, requests_ms, tokens_in_window, tokens_ms = answer
        standing = LimitStatus(
            num_requests=num_in_window,
            requests_reset_s=requests_ms / 1e3,
            num_tokens=tokens_in_window,
            tokens_reset_s=tokens_ms / 1e3,
        )
        if rejected:
            raise rejection(key, _WHAT[rejected.decode()], retry_after_s=retry_ms / 1e3, standing=standing)
        return Reservation(key=key, id=id, second=second, num_tokens=num_tokens, standing=standing)

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        self._owe(taken, "", -num_tokens)
        await self._pay(taken.key, after_s=self._ride_s)

    async def settle(self, taken: Reservation, *, used: int) -> None:
        has_place = taken.key.concurrency is not None
        self._owe(taken, taken.id if has_place else "", used - taken.num_tokens)
        await self._pay(taken.key, after_s=0 if has_place else self._ride_s)

    def _owe(self, taken: Reservation, id: str, num_tokens: int) -> None:
        if id or (num_tokens and taken.key.tpm is not None):
            self._owed[taken.key.id] += [id, taken.second, num_tokens]

    async def _pay(self, key: ApiKey, *, after_s: float) -> None:
        """Unless another trip takes it along meanwhile."""
        if after_s and key.id in self._owed:
            await asyncio.sleep(after_s)
        if owed := self._owed.pop(key.id, None):
            await self._settle(keys=places_of(self._name, key.id), args=owed)

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
