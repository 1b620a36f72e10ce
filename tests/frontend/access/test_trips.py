"""Redis round trips per request, counted by Redis, and correctness of the limits meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from core.index.redis_client import connect_redis
from core.types.errors import RateLimited
from frontend.access.identity import Client
from frontend.access.limits import Limits
from frontend.access.local_limiter import LocalLimiter
from frontend.access.redis_limiter import RedisLimiter
from frontend.text.completion import Completion
from frontend.text.completion_request import CompletionRequest
from tests.frontend.access.keys import SALT_KEY, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions

_LONG_S = 600.0  # so that returned tokens always ride on another call


@pytest.fixture
def looking(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture
async def routers(redis_url: str, looking: redis.Redis) -> AsyncIterator[list[Limits]]:
    clients = [connect_redis(redis_url) for _ in range(2)]
    yield [Limits(RedisLimiter(client, name="d", delay_s=_LONG_S), LocalLimiter()) for client in clients]
    for client in clients:
        await client.aclose()


def client(**limits: int) -> Client:
    return Client(key=issue("acme", **limits).key, salt_key=SALT_KEY)


async def opened(completions: MakeCompletions, **fields: int) -> Completion:
    request = CompletionRequest(id="r1", prompt="abc", ignore_eos=True, **fields)
    return await completions(FakeTokenService(), max_context=1000).open(request)


def num_trips(looking: redis.Redis) -> int:
    return int(looking.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"rpm": 100}, 1),
        ({"tpm": 1000}, 1),
        ({"rpm": 100, "tpm": 1000}, 1),
        ({"concurrency": 5}, 2),
        ({"rpm": 100, "tpm": 1000, "concurrency": 5}, 2),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, dict) else str(each),
)
async def test_one_round_trip_before_a_request_and_one_after(
    completions: MakeCompletions, routers: list[Limits], looking: redis.Redis, limits: dict[str, int], most: int
) -> None:
    asking, one = client(**limits), await opened(completions, max_tokens=20)
    for number in range(6):
        before = num_trips(looking)
        async with routers[0].entered(asking) as request_context:
            await request_context.charge([one])
            waited_for = num_trips(looking) - before
        if asking.key and asking.key.concurrency:
            await routers[0].settled()
        if number > 1:  # by now the router has estimated the tokens, and Redis has cached the scripts
            assert (waited_for, num_trips(looking) - before) == (1, most)


async def test_larger_request_needs_a_second_trip(
    completions: MakeCompletions, routers: list[Limits], looking: redis.Redis
) -> None:
    asking, needed = client(tpm=1000), []
    for most in (20, 20, 30, 30, 10, 600, 600):
        before = num_trips(looking)
        async with routers[0].entered(asking) as request_context:
            await request_context.charge([await opened(completions, max_tokens=most)])
            needed.append(num_trips(looking) - before)
    assert needed[1:] == [1, 2, 1, 1, 2, 2], "the last needs more than half of the limit"


async def test_two_routers_share_a_limit_exactly(
    completions: MakeCompletions, routers: list[Limits], looking: redis.Redis
) -> None:
    asking, draw = client(tpm=400), random.Random(5)
    given, used, num_rejected = 0, 0, 0

    async def ask(number: int) -> None:
        nonlocal given, used, num_rejected
        one = await opened(completions, max_tokens=draw.randrange(1, 60))
        try:
            async with routers[number % 2].entered(asking) as request_context:
                await request_context.charge([one])
                given += one.most_tokens
                assert given <= 400
                await asyncio.sleep(0)
                if number % 40 == 0:
                    async with one.run() as events:
                        assert [event async for event in events]
                given += one.used_tokens - one.most_tokens
                used += one.used_tokens
        except RateLimited:
            num_rejected += 1

    for wave in range(20):
        await asyncio.gather(*(ask(10 * wave + number) for number in range(10)))
    assert asking.key and used and 0 < num_rejected < 150
    ahead = 0
    for router in routers:  # returned tokens ride on this call
        async with router.entered(asking) as request_context:
            assert request_context.place
            ahead += request_context.place[1].num_tokens
    counted = looking.hgetall(f"d:key:{asking.key.id}:used")
    assert sum(int(count) for field, count in counted.items() if field.startswith(b"t")) == used + ahead
