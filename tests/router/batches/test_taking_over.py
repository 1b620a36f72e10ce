"""A batch and the routers that work on it: one at a time, the next goes on where one has stopped, each line once."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from core.index.redis_client import connect_redis
from tests.frontend.access.keys import access_with, issue
from tests.router.batches.batch_doors import batch_router, chat_line, ended, jsonl, read, sent
from tests.support.fake_token_service import FakeTokenService
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import told

_NONE_REFUSED = 'outcome="invalid_value"} 0.0'
_LINES = [chat_line(f"{number}", max_tokens=1 + number % 2) for number in range(20)]


@pytest.fixture
def empty_redis(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


class Cable:
    """Between one router and Redis."""

    def __init__(self, url: str, directory: Path) -> None:
        self._socket = url.removeprefix("unix://")
        self._way = directory / "way"
        self.mend()
        self.redis: Redis = connect_redis(f"unix://{self._way}")

    async def cut(self) -> None:
        """What is sent, and what would be heard, is lost."""
        self._way.unlink()
        await self.redis.connection_pool.disconnect()

    def mend(self) -> None:
        self._way.symlink_to(self._socket)


@pytest.fixture
def cable(empty_redis: str, tmp_path: Path) -> Cable:
    return Cable(empty_redis, tmp_path)


def hanging_at(number: int) -> FakeTokenService:
    """From its so many-th request on, what it is asked gets stuck."""
    fake = FakeTokenService()

    def script(request: Any, choice: int) -> Any:
        if len(fake.started) >= number:
            fake.hang_after = 0
        return request.token_ids

    fake.script = script
    return fake


async def test_a_router_that_vanishes_is_followed_by_another_and_each_line_has_one_answer(
    completions: MakeCompletions, empty_redis: str, cable: Cable
) -> None:
    first, second = hanging_at(8), FakeTokenService()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(
            batch_router(completions, empty_redis, fake=first, client=cable.redis, lease_s=1.0)
        )
        batch = await sent(one.client, jsonl(_LINES))
        await first.is_hanging.wait()

        async def some_are_there() -> bool:
            counts = (await one.client.batches.retrieve(batch.id)).request_counts
            return bool(counts and counts.completed >= 4)

        await told(some_are_there)
        await cable.cut()
        other = await stack.enter_async_context(batch_router(completions, empty_redis, fake=second, lease_s=1.0))
        done = await ended(other.client, batch)
        answers = await read(other.client, done.output_file_id)
        cable.mend()
        first.hang_after = None
        first.go_on.set()  # what was stuck comes to its end, too late
        await first.has_ended.wait()
        assert await read(other.client, done.output_file_id) == answers
        again = await other.client.batches.retrieve(batch.id)
    assert [one["custom_id"] for one in answers] == [line["custom_id"] for line in _LINES]
    assert again == done and done.request_counts
    assert done.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert 0 < len(second.started) <= 16, "what was recorded is not asked again"


async def test_a_router_that_leaves_hands_over_at_once(completions: MakeCompletions, empty_redis: str) -> None:
    first, second = hanging_at(6), FakeTokenService()
    async with batch_router(completions, empty_redis, fake=first, lease_s=600.0) as one:
        batch = await sent(one.client, jsonl(_LINES))
        await first.is_hanging.wait()
    async with batch_router(completions, empty_redis, fake=second, lease_s=600.0) as other:
        done = await ended(other.client, batch)
        answers = await read(other.client, done.output_file_id)
    assert [one["custom_id"] for one in answers] == [line["custom_id"] for line in _LINES]


async def test_a_line_that_was_refused_is_not_asked_again(completions: MakeCompletions, empty_redis: str) -> None:
    lines = [*(chat_line(f"wrong-{number}", max_tokens=0) for number in range(4)), *_LINES]
    async with batch_router(completions, empty_redis, fake=hanging_at(1)) as one:
        batch = await sent(one.client, jsonl(lines))

        async def all_are_refused() -> bool:
            counts = (await one.client.batches.retrieve(batch.id)).request_counts
            return bool(counts and counts.failed == 4)

        await told(all_are_refused)
        assert _NONE_REFUSED not in one.metrics
    async with batch_router(completions, empty_redis) as other:
        done = await ended(other.client, batch)
        assert _NONE_REFUSED in other.metrics
        errors = await read(other.client, done.error_file_id)
    assert [error["custom_id"] for error in errors] == [line["custom_id"] for line in lines[:4]]


async def test_one_router_at_a_time_works_on_a_batch(completions: MakeCompletions, empty_redis: str) -> None:
    keys = [issue(name) for name in ("a", "b", "c", "d")]
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(batch_router(completions, empty_redis, access=access_with(*keys)))
            for _ in range(3)
        ]
        clients = [routers[number % 3].client_of(key.secret) for number, key in enumerate(keys)]
        batches = [await sent(client, jsonl(_LINES)) for client in clients for _ in range(2)]
        for number, batch in enumerate(batches):
            done = await ended(clients[number // 2], batch)
            assert done.request_counts and done.request_counts.completed == 20
        assert sum(len(router.fake.started) for router in routers) == len(batches) * len(_LINES)


async def test_redis_that_is_away_for_a_moment_costs_no_answer(
    completions: MakeCompletions, empty_redis: str, cable: Cable
) -> None:
    fake = hanging_at(8)
    async with batch_router(completions, empty_redis, fake=fake, client=cable.redis, lease_s=600.0) as router:
        batch = await sent(router.client, jsonl(_LINES))
        await fake.is_hanging.wait()
        await cable.cut()
        fake.hang_after = None
        fake.script = lambda request, choice: request.token_ids
        fake.go_on.set()
        await fake.has_ended.wait()
        num_asked = len(fake.started)
        cable.mend()
        done = await ended(router.client, batch)
        answers = await read(router.client, done.output_file_id)
    assert num_asked < 20 == len(fake.started), "each line once"
    assert Counter(one["custom_id"] for one in answers) == Counter(line["custom_id"] for line in _LINES)
