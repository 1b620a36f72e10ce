"""Conformance suite of both limiters, and the Redis limiter with several routers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from core.index.key_channel import places_of
from core.index.redis_client import connect_redis
from core.types.api_key import ApiKey, new_key
from core.types.errors import RateLimited
from frontend.access.limiter import LEASE_S, WINDOW, Limiter, LocalLimiter, Reservation
from frontend.access.redis_limiter import RedisLimiter

Make = Callable[[], Limiter]


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.25

    def now(self) -> float:
        return self.seconds

    def now_ms(self) -> int:
        return round(self.seconds * 1e3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def clients(redis_url: str) -> AsyncIterator[list[Redis]]:
    redis.Redis.from_url(redis_url).flushall()
    found = [connect_redis(redis_url) for _ in range(2)]
    yield found
    for client in found:
        await client.aclose()


@pytest.fixture(params=["local", "redis"])
def limiter(request: pytest.FixtureRequest, clock: Clock, clients: list[Redis]) -> Limiter:
    if request.param == "local":
        return LocalLimiter(now=clock.now)
    return RedisLimiter(clients[0], name="d", now_ms=clock.now_ms, delay_s=0)


def key(**limits: Any) -> ApiKey:
    return new_key("acme", "sk-x", **limits)


async def take(
    limiter: Limiter, of: ApiKey, *, tokens: int = 0, id: str = "", ahead: int = 0
) -> Reservation | RateLimited:
    """Reserve like a request. ahead: tokens taken before the number needed is known."""
    try:
        entered = await limiter.enter(of, id=id or f"{random.getrandbits(64):x}", ahead=ahead)
    except RateLimited as error:
        return error
    if of.tpm is None:
        return entered
    if ahead and tokens <= entered.num_tokens:
        await limiter.give_back(entered, num_tokens=entered.num_tokens - tokens)
        return entered.with_tokens(tokens)
    try:
        return await limiter.charge(entered, num_tokens=tokens)
    except RateLimited as error:
        await limiter.settle(entered.with_tokens(0), used=0)
        return error


async def taken(limiter: Limiter, of: ApiKey, **asked: Any) -> Reservation:
    found = await take(limiter, of, **asked)
    assert isinstance(found, Reservation), found
    return found


async def rejected(limiter: Limiter, of: ApiKey, **asked: Any) -> RateLimited:
    found = await take(limiter, of, **asked)
    assert isinstance(found, RateLimited)
    return found


async def test_requests_per_minute(limiter: Limiter, clock: Clock) -> None:
    limited = key(rpm=3)
    for _ in range(3):
        await taken(limiter, limited)
        clock.seconds += 10
    error = await rejected(limiter, limited)
    assert "3 requests a minute" in str(error)
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    clock.seconds += error.retry_after_s - 0.001
    await rejected(limiter, limited)
    clock.seconds += 0.001  # now only the first one has left the window
    await taken(limiter, limited)
    await rejected(limiter, limited)


async def test_any_minute_is_within_the_limit(limiter: Limiter, clock: Clock) -> None:
    limited = key(rpm=5)
    draw = random.Random(7)
    passed = []
    for _ in range(300):
        clock.seconds += draw.expovariate(1 / 4)
        if isinstance(await take(limiter, limited), Reservation):
            passed.append(clock.seconds)
    assert all(later - earlier > 60 for earlier, later in zip(passed, passed[5:], strict=False))
    assert len(passed) > 80  # of 1,200 s, 100 at most


async def test_tokens_are_taken_before_and_settled_after(limiter: Limiter) -> None:
    limited = key(tpm=100)
    first = await taken(limiter, limited, tokens=80)
    error = await rejected(limiter, limited, tokens=30)
    assert "100 tokens a minute" in str(error) and error.headers["x-ratelimit-remaining-tokens"] == "20"
    await limiter.settle(first, used=10)
    second = await taken(limiter, limited, tokens=90)
    assert second.status.num_tokens == 100
    await limiter.settle(second, used=95)  # usage beyond the reservation is charged, too
    assert (await rejected(limiter, limited, tokens=1)).headers["x-ratelimit-remaining-tokens"] == "0"


async def test_settling_a_minute_later_changes_nothing(limiter: Limiter, clock: Clock) -> None:
    limited = key(tpm=100)
    first = await taken(limiter, limited, tokens=100)
    clock.seconds += WINDOW
    await taken(limiter, limited, tokens=60)
    await limiter.settle(first, used=5)
    await rejected(limiter, limited, tokens=41)


async def test_concurrent_requests(limiter: Limiter) -> None:
    limited = key(concurrency=2)
    first, _ = [await taken(limiter, limited) for _ in range(2)]
    error = await rejected(limiter, limited)
    assert "2 requests at a time" in str(error) and error.retry_after_s > 0 and error.headers == {}
    await limiter.settle(first, used=0)
    await taken(limiter, limited)


async def test_rejected_request_takes_nothing(limiter: Limiter) -> None:
    limited = key(rpm=10, tpm=10, concurrency=1)
    first = await taken(limiter, limited, tokens=4)
    for _ in range(5):
        await rejected(limiter, limited, tokens=4)  # by the concurrency limit
        await rejected(limiter, limited, tokens=9)  # by the token limit
    await limiter.settle(first, used=4)
    status = (await taken(limiter, limited, tokens=6)).status
    assert (status.num_requests, status.num_tokens) == (2, 10)


async def test_keys_are_counted_separately(limiter: Limiter) -> None:
    one, other = key(rpm=1), key(rpm=1)
    await taken(limiter, one)
    await taken(limiter, other)
    await rejected(limiter, one)


async def test_headers_are_those_of_openai(limiter: Limiter, clock: Clock) -> None:
    limited = key(rpm=5, tpm=50)
    await taken(limiter, limited, tokens=10)
    clock.seconds += 30
    headers = (await taken(limiter, limited, tokens=15)).status.headers(limited)
    assert headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "61.750s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "25",
        "x-ratelimit-reset-tokens": "61.750s",
    }
    assert (await taken(limiter, key(concurrency=1))).status.headers(key(concurrency=1)) == {}


async def test_both_limiters_agree(clock: Clock, clients: list[Redis]) -> None:
    limited = key(rpm=8, tpm=60, concurrency=4)
    in_redis = RedisLimiter(clients[0], name="d", now_ms=clock.now_ms, delay_s=0)
    both: list[Limiter] = [LocalLimiter(now=clock.now), in_redis]
    draw = random.Random(3)
    running: list[list[Reservation]] = []
    counts = {"taken": 0, "refused": 0}
    for number in range(400):
        clock.seconds = round(clock.seconds + draw.expovariate(1 / 3), 3)
        for pair in running:
            for limiter, one in zip(both, pair, strict=True):
                await limiter.renew([one])
        if running and draw.random() < 0.4:
            used = draw.randrange(30)
            for limiter, one in zip(both, running.pop(draw.randrange(len(running))), strict=True):
                await limiter.settle(one, used=used)
            continue
        tokens, ahead = draw.randrange(30), draw.randrange(30)
        answers = [await take(limiter, limited, tokens=tokens, id=str(number), ahead=ahead) for limiter in both]
        said = [
            (str(one), one.headers) if isinstance(one, RateLimited) else ("", one.status.headers(limited))
            for one in answers
        ]
        assert said[0] == said[1]
        if isinstance(answers[0], RateLimited):
            counts["refused"] += 1
            assert isinstance(answers[1], RateLimited)
            assert answers[0].retry_after_s == pytest.approx(answers[1].retry_after_s, abs=2e-3)
        else:
            counts["taken"] += 1
            running.append([one for one in answers if isinstance(one, Reservation)])
    assert min(counts.values()) > 50


# ---- several routers


async def test_limit_is_exact_across_routers(clients: list[Redis]) -> None:
    routers = [RedisLimiter(client, name="d") for client in clients]
    for limited, wanted in (
        (key(rpm=20), 20),
        (key(concurrency=20), 20),
        (key(tpm=200), 20),
    ):
        answers = await asyncio.gather(*(take(routers[i % 2], limited, tokens=10) for i in range(100)))
        assert sum(isinstance(answer, Reservation) for answer in answers) == wanted


async def test_slots_of_a_dead_router_return(clients: list[Redis], clock: Clock) -> None:
    lives, dies = (RedisLimiter(client, name="d", now_ms=clock.now_ms) for client in clients)
    limited = key(concurrency=2)
    kept = await taken(lives, limited)
    await taken(dies, limited)
    clock.seconds += LEASE_S / 2
    await lives.renew([kept])
    await rejected(lives, limited)
    clock.seconds += LEASE_S / 2 + 0.001
    await taken(lives, limited)
    await rejected(lives, limited)


async def test_running_requests_count_again_after_their_lease_expired(clients: list[Redis], clock: Clock) -> None:
    limiter = RedisLimiter(clients[0], name="d", now_ms=clock.now_ms)
    limited = key(concurrency=1)
    first = await taken(limiter, limited)
    clock.seconds += LEASE_S + 1
    second = await taken(limiter, limited)
    await limiter.renew([first])
    await limiter.settle(second, used=0)
    await rejected(limiter, limited)
    await limiter.settle(first, used=0)
    await taken(limiter, limited)


async def test_counts_of_future_seconds_are_dropped(clients: list[Redis], clock: Clock) -> None:
    """Guards against a Redis clock that went back, and malformed counters."""
    limiter = RedisLimiter(clients[0], name="d", now_ms=clock.now_ms)
    limited = key(rpm=1, tpm=10, concurrency=1)
    clock.seconds += 86_400
    await taken(limiter, limited, tokens=10)
    clock.seconds -= 86_400
    await clients[0].hset(f"d:key:{limited.id}:used", "nonsense", "x")
    await taken(limiter, limited, tokens=10)
    assert (await rejected(limiter, limited)).retry_after_s <= WINDOW


async def test_exhausted_key_is_rejected(limiter: Limiter) -> None:
    """Rejected before the number of tokens is known."""
    limited = key(tpm=10)
    first = await taken(limiter, limited, tokens=10)
    with pytest.raises(RateLimited, match="10 tokens a minute"):
        await limiter.enter(limited, id="next")
    await limiter.settle(first, used=9)
    await limiter.enter(limited, id="next")


async def test_tokens_ahead_leave_as_many_for_the_next_request(limiter: Limiter) -> None:
    limited = key(tpm=100)
    given = [await limiter.enter(limited, id=str(number), ahead=30) for number in range(3)]
    assert [one.num_tokens for one in given] == [30, 30, 0]
    assert (await limiter.charge(given[2], num_tokens=40)).status.num_tokens == 100
    assert (await limiter.enter(key(rpm=5), id="no limit of tokens", ahead=30)).num_tokens == 0


async def test_tokens_ahead_are_exchanged_for_the_bound(limiter: Limiter) -> None:
    limited = key(tpm=100)
    first = await limiter.enter(limited, id="first", ahead=50)
    more = await limiter.charge(first, num_tokens=70)
    assert (more.num_tokens, more.status.num_tokens) == (70, 70)
    second = await limiter.enter(limited, id="second", ahead=15)
    with pytest.raises(RateLimited) as caught:
        await limiter.charge(second, num_tokens=31)
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "30", "those ahead are given back"
    await limiter.settle(more, used=70)
    third = await limiter.enter(limited, id="third", ahead=15)
    await limiter.give_back(third, num_tokens=9)
    assert third.with_tokens(6).status.num_tokens == 76
    assert (await limiter.charge(third.with_tokens(0), num_tokens=24)).status.num_tokens == 100


async def test_lone_router_enforces_its_share() -> None:
    limiter = LocalLimiter(num_routers=3)
    limited = key(rpm=10)
    answers = [await take(limiter, limited) for _ in range(10)]
    assert sum(isinstance(answer, Reservation) for answer in answers) == 3


async def test_counters_of_another_type_are_replaced(clients: list[Redis]) -> None:
    limiter, limited = RedisLimiter(clients[0], name="d"), key(rpm=1, concurrency=1)
    for place in places_of("d", limited.id):
        await clients[0].lpush(place, "foreign")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await limiter.enter(limited, id="a")
    await limiter.enter(limited, id="a")
    with pytest.raises(RateLimited):
        await limiter.enter(limited, id="b")
