"""Limits around a request: round trips, Redis outages and client disconnects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.types.api_key import ApiKey
from core.types.errors import RateLimited, RequestError
from frontend.access.access import Client
from frontend.access.limiter import WINDOW, Limiter, LocalLimiter, Reservation
from frontend.access.limits import Limits
from frontend.access.redis_limiter import RedisLimiter
from frontend.text.completion import Completion
from frontend.text.completion_request import CompletionRequest
from tests.frontend.access.keys import SALT_KEY, issue
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes


def client(**limits: Any) -> Client:
    return Client(key=issue("acme", **limits).key, salt_key=SALT_KEY)


@pytest.fixture
def limits() -> Limits:
    return Limits(None, LocalLimiter())


@asynccontextmanager
async def reserved(
    limits: Limits, asking: Client, completions: Sequence[Completion]
) -> AsyncIterator[Mapping[str, str]]:
    """Open a tokenized completion, as the endpoints do."""
    async with limits.entered(asking.key) as request_context:
        yield await request_context.charge(completions)


async def opened(
    completions: MakeCompletions, prompt: str = "abc", *, max_context: int = 256, **fields: Any
) -> Completion:
    request = CompletionRequest(id="r1", prompt=prompt, ignore_eos=True, **fields)
    return await completions(max_context=max_context).open(request)


async def passes(limits: Limits, asking: Client, one: Completion) -> bool:
    """Return whether a request is accepted; it ends at once."""
    try:
        async with reserved(limits, asking, [one]):
            return True
    except RateLimited:
        return False


async def run(completion: Completion) -> None:
    async with completion.run() as events:
        async for _ in events:
            pass


async def test_unused_tokens_are_returned(completions: MakeCompletions, limits: Limits) -> None:
    asking = client(tpm=120)
    for _ in range(5):  # each might use 60 and uses 13
        one = await opened(completions, max_tokens=20, n=3, stop=("zz",))
        num_prompt = len(one.prompt_ids)
        async with reserved(limits, asking, [one]) as headers:
            assert int(headers["x-ratelimit-remaining-tokens"]) >= 0
            assert one.most_tokens == num_prompt + 60
        await limits.settled()  # never dispatched, so nothing is charged
    one = await opened(completions, max_tokens=10)
    async with reserved(limits, asking, [one]):
        await run(one)
    await limits.settled()
    async with reserved(limits, asking, [one]) as headers:
        assert int(headers["x-ratelimit-remaining-tokens"]) == 120 - 2 * (len(one.prompt_ids) + 10)


async def test_request_without_limits_can_use_the_whole_budget(completions: MakeCompletions, limits: Limits) -> None:
    one = await opened(completions)  # up to the context
    async with reserved(limits, client(tpm=50), [one]) as headers:
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert one.most_tokens == 50


async def test_answer_beyond_the_budget_is_rejected_for_good(completions: MakeCompletions, limits: Limits) -> None:
    one = await opened(completions, max_tokens=20, n=3)
    with pytest.raises(RequestError, match="exceed 60 tokens a minute"):
        assert await passes(limits, client(tpm=60), one)


async def test_prompt_beyond_the_budget_is_rejected_for_good(completions: MakeCompletions, limits: Limits) -> None:
    one = await opened(completions, "a b c d e f g h", max_tokens=1)
    with pytest.raises(RequestError, match=r"prompt: has \d+ tokens; this API key allows 2 tokens a minute"):
        assert await passes(limits, client(tpm=2), one)


class FakeOutage:
    """Limiter that can fail, and can be delayed after it has counted."""

    def __init__(self, inner: Limiter) -> None:
        self.is_unavailable = False
        self.num_calls = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.has_counted = asyncio.Event()
        self._inner = inner

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        self._check()
        return await self._held_up(await self._inner.enter(key, id=id, ahead=ahead))

    async def charge(self, taken: Reservation, *, num_tokens: int) -> Reservation:
        self._check()
        return await self._held_up(await self._inner.charge(taken, num_tokens=num_tokens))

    async def give_back(self, taken: Reservation, *, num_tokens: int) -> None:
        self._check()
        await self._inner.give_back(taken, num_tokens=num_tokens)

    async def _held_up(self, found: Reservation) -> Reservation:
        self.has_counted.set()
        await self.goes_on.wait()
        return found

    async def settle(self, taken: Reservation, *, used: int) -> None:
        self._check()
        await self._inner.settle(taken, used=used)

    async def renew(self, taken: list[Reservation]) -> None:
        self._check()
        await self._inner.renew(taken)

    def _check(self) -> None:
        self.num_calls += 1
        if self.is_unavailable:
            raise redis.ConnectionError("away")


async def test_running_requests_count_again_after_a_redis_outage(completions: MakeCompletions, redis_url: str) -> None:
    there, now_ms = connect_redis(redis_url), 10**9
    shared = FakeOutage(RedisLimiter(there, name="d", now_ms=lambda: now_ms))
    limits = Limits(shared, LocalLimiter(), try_again_s=0.0)
    asking, one = client(concurrency=1), await opened(completions, max_tokens=1)
    async with reserved(limits, asking, [one]):
        shared.is_unavailable = True
        assert await passes(limits, asking, one)
        shared.is_unavailable = False
        now_ms += 11_000
        assert not await passes(limits, asking, one)
    await limits.settled()
    await there.aclose()


async def test_requests_do_not_wait_for_redis_again_for_a_while(completions: MakeCompletions) -> None:
    """Each would wait for the limit of an answer."""
    shared = FakeOutage(LocalLimiter())
    shared.is_unavailable = True
    limits = Limits(shared, LocalLimiter(), try_again_s=1e6)
    for _ in range(3):
        async with reserved(limits, client(rpm=10), [await opened(completions, max_tokens=1)]):
            pass
    await limits.settled()
    assert shared.num_calls == 1


async def test_disconnect_during_the_reservation_returns_everything(completions: MakeCompletions) -> None:
    shared = FakeOutage(LocalLimiter())
    limits = Limits(shared, LocalLimiter())
    asking, one = client(concurrency=1, tpm=100), await opened(completions, max_tokens=80)
    shared.goes_on.clear()

    task = asyncio.create_task(passes(limits, asking, one))
    await shared.has_counted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    shared.goes_on.set()
    await limits.settled()
    assert await passes(limits, asking, one)
    await limits.settled()


async def test_malformed_counts_do_not_affect_other_keys(completions: MakeCompletions, redis_url: str) -> None:
    there = connect_redis(redis_url)
    limits = Limits(RedisLimiter(there, name="d"), LocalLimiter())
    harmed, well, one = client(rpm=5), client(rpm=5), await opened(completions, max_tokens=1)
    assert harmed.key and well.key
    await there.set(f"d:key:{harmed.key.id}:used", "no hash")
    for asking in (harmed, well):
        assert await passes(limits, asking, one)
    assert await there.exists(f"d:key:{well.key.id}:used")
    await limits.settled()
    await there.aclose()


async def test_without_redis_each_router_enforces_its_share(completions: MakeCompletions) -> None:
    away = connect_redis(f"redis://127.0.0.1:{free_port()}")
    limits = Limits(RedisLimiter(away, name="d"), LocalLimiter(num_routers=2))
    asking, one = client(rpm=4), await opened(completions, max_tokens=1)
    for _ in range(2):
        assert await passes(limits, asking, one)
    assert not await passes(limits, asking, one)
    await limits.settled()
    await away.aclose()


async def test_unlimited_key_calls_no_limiter(completions: MakeCompletions, redis_url: str) -> None:
    there = connect_redis(redis_url)
    limits = Limits(RedisLimiter(there, name="d"), LocalLimiter())
    one, key = await opened(completions, max_tokens=1), client().key
    assert key
    async with reserved(limits, Client(key=replace(key, max_tokens=5), salt_key=SALT_KEY), [one]) as headers:
        assert headers == {}
    with redis.Redis.from_url(redis_url) as looking:
        assert not looking.exists(f"d:key:{key.id}:used")
    await there.aclose()


async def test_tokens_ahead_are_returned_by_slow_uploads(completions: MakeCompletions) -> None:
    limits = Limits(None, LocalLimiter(), ahead_s=0.0)
    asking = client(tpm=100)
    one, all_of_it = [await opened(completions, max_tokens=number) for number in (40, 90)]
    assert await passes(limits, asking, one)
    await limits.settled()
    async with limits.entered(asking.key) as reading:
        assert reading.place and reading.place[1].num_tokens == one.most_tokens, "as many as the one before it"
        await becomes(lambda: reading.place and not reading.place[1].num_tokens)
        await limits.settled()
        async with reserved(limits, asking, [all_of_it]):
            with pytest.raises(RateLimited):
                await reading.charge([one])


async def test_exhausted_key_is_rejected_from_memory(completions: MakeCompletions, redis_url: str) -> None:
    there = connect_redis(redis_url)
    limits = Limits(RedisLimiter(there, name="d"), LocalLimiter())
    asking, one = client(rpm=1), await opened(completions, max_tokens=1)
    assert await passes(limits, asking, one)
    assert not await passes(limits, asking, one)  # the limiter rejects this one
    with redis.Redis.from_url(redis_url) as forgetting:
        forgetting.flushall()
    with pytest.raises(RateLimited) as caught:
        async with limits.entered(asking.key):
            pass
    assert 0 < caught.value.retry_after_s <= WINDOW
    assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
    async with limits.entered(client(rpm=1).key):
        pass
    await limits.settled()
    await there.aclose()


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
        async with routers[0].entered(asking.key) as request_context:
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
        async with routers[0].entered(asking.key) as request_context:
            await request_context.charge([await opened(completions, max_context=1000, max_tokens=most)])
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
            async with routers[number % 2].entered(asking.key) as request_context:
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
        async with router.entered(asking.key) as request_context:
            assert request_context.place
            ahead += request_context.place[1].num_tokens
    counted = looking.hgetall(f"d:key:{asking.key.id}:used")
    assert sum(int(count) for field, count in counted.items() if field.startswith(b"t")) == used + ahead
