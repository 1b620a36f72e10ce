"""Limits around a request, including Redis outages and client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.types.api_key import ApiKey
from core.types.errors import RateLimited, RequestError
from frontend.access.identity import Client
from frontend.access.limiter import WINDOW, Limiter, Reservation
from frontend.access.limits import Limits
from frontend.access.local_limiter import LocalLimiter
from frontend.access.redis_limiter import RedisLimiter
from frontend.text.completion import Completion
from frontend.text.completion_request import CompletionRequest
from tests.frontend.access.keys import SALT_KEY, issue
from tests.support.fake_token_service import FakeTokenService
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
    async with limits.entered(asking) as request_context:
        yield await request_context.charge(completions)


async def opened(completions: MakeCompletions, prompt: str = "abc", **fields: Any) -> Completion:
    request = CompletionRequest(id="r1", prompt=prompt, ignore_eos=True, **fields)
    return await completions(FakeTokenService()).open(request)


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
        async with reserved(limits, client(tpm=60), [one]):
            pass


async def test_prompt_beyond_the_budget_is_rejected_for_good(completions: MakeCompletions, limits: Limits) -> None:
    one = await opened(completions, "a b c d e f g h", max_tokens=1)
    with pytest.raises(RequestError, match=r"prompt: has \d+ tokens; this API key allows 2 tokens a minute"):
        async with reserved(limits, client(tpm=2), [one]):
            pass


async def test_cancelled_request_returns_its_slot(completions: MakeCompletions, limits: Limits) -> None:
    asking, one = client(concurrency=1), await opened(completions, max_tokens=1)
    has_begun = asyncio.Event()

    async def hold() -> None:
        async with reserved(limits, asking, [one]):
            has_begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await has_begun.wait()
    with pytest.raises(RateLimited):
        async with reserved(limits, asking, [one]):
            pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await limits.settled()
    async with reserved(limits, asking, [one]):
        pass


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
        async with reserved(limits, asking, [one]):
            pass
        shared.is_unavailable = False
        now_ms += 11_000
        with pytest.raises(RateLimited):
            async with reserved(limits, asking, [one]):
                pass
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

    async def ask() -> None:
        async with reserved(limits, asking, [one]):
            pass

    task = asyncio.create_task(ask())
    await shared.has_counted.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    shared.goes_on.set()
    await limits.settled()
    await ask()
    await limits.settled()


async def test_malformed_counts_do_not_affect_other_keys(completions: MakeCompletions, redis_url: str) -> None:
    there = connect_redis(redis_url)
    limits = Limits(RedisLimiter(there, name="d"), LocalLimiter())
    harmed, well, one = client(rpm=5), client(rpm=5), await opened(completions, max_tokens=1)
    assert harmed.key and well.key
    await there.set(f"d:key:{harmed.key.id}:used", "no hash")
    for asking in (harmed, well):
        async with reserved(limits, asking, [one]):
            pass
    assert await there.exists(f"d:key:{well.key.id}:used")
    await limits.settled()
    await there.aclose()


async def test_without_redis_each_router_enforces_its_share(completions: MakeCompletions) -> None:
    away = connect_redis(f"redis://127.0.0.1:{free_port()}")
    limits = Limits(RedisLimiter(away, name="d"), LocalLimiter(num_routers=2))
    asking, one = client(rpm=4), await opened(completions, max_tokens=1)
    for _ in range(2):
        async with reserved(limits, asking, [one]):
            pass
    with pytest.raises(RateLimited):
        async with reserved(limits, asking, [one]):
            pass
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
    async with reserved(limits, asking, [one]):
        pass
    await limits.settled()
    async with limits.entered(asking) as reading:
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
    async with reserved(limits, asking, [one]):
        pass
    with pytest.raises(RateLimited):  # the limiter rejects this one
        async with reserved(limits, asking, [one]):
            pass
    with redis.Redis.from_url(redis_url) as forgetting:
        forgetting.flushall()
    with pytest.raises(RateLimited) as caught:
        async with limits.entered(asking):
            pass
    assert 0 < caught.value.retry_after_s <= WINDOW
    assert caught.value.headers["x-ratelimit-remaining-requests"] == "0"
    async with limits.entered(client(rpm=1)):
        pass
    await limits.settled()
    await there.aclose()
