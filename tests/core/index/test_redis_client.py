"""Redis client: many concurrent calls, failovers, keys of another type, and the log of outages."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisUnreachable
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from core.index import redis_client
from core.index.key_channel import KeyPublisher
from core.index.membership import Membership
from core.index.redis_client import RedisReach, connect_redis, is_about_one_key, reason_of
from core.index.revision_channel import RevisionChannel
from core.index.router_addresses import RouterAddresses
from core.index.store import IndexWriter
from core.types.api_key import KeyRegistry
from core.types.tier import Tier
from tests.support.grids import quick
from tests.support.members import make_member
from tests.support.redis_at import Relay, redis_at
from tests.support.waiting import WITHIN_S

_KEY = bytes(32)


async def test_concurrent_calls_wait_for_a_free_connection(redis_url: str) -> None:
    """An error instead would look like an outage, and suspend the limits of API keys."""
    client = connect_redis(redis_url, within_s=WITHIN_S)
    try:
        assert await asyncio.gather(*(client.echo(f"{number}") for number in range(300))) == [
            f"{number}".encode() for number in range(300)
        ]
        assert len(await client.client_list()) <= 100
    finally:
        await client.aclose()


@pytest.fixture
def two_servers(tmp_path: Path) -> Iterator[tuple[str, str]]:
    with redis_at("127.0.0.1", tmp_path) as one, redis_at("127.0.0.1", tmp_path) as other:
        yield one, other


def _port(url: str) -> int:
    return urlsplit(url).port or 0


def _refuse(url: str, refusal: str, other: str) -> None:
    """Make the server at `url` answer writes with this error."""
    with BlockingRedis.from_url(url) as server:
        match refusal:
            case "READONLY":
                server.replicaof("127.0.0.1", str(_port(other)))
            case "MASTERDOWN":
                server.config_set("replica-serve-stale-data", "no")
                server.replicaof("127.0.0.1", "1")
            case "NOREPLICAS":
                server.config_set("min-replicas-to-write", "1")
            case "OOM":
                server.config_set("maxmemory", "1")
            case "NOPERM":
                server.acl_setuser("default", enabled=True, nopass=True, commands=["-set"])


@pytest.mark.parametrize(
    ("refusal", "is_pipeline"),
    quick(
        product(["READONLY", "MASTERDOWN", "NOREPLICAS", "OOM", "NOPERM"], [False, True]),
        [("OOM", True), *((refusal, False) for refusal in ("MASTERDOWN", "NOREPLICAS", "NOPERM"))],
    ),
)
async def test_a_refusal_drops_the_connection(two_servers: tuple[str, str], refusal: str, is_pipeline: bool) -> None:
    """The client connects again by name, which may lead to the new primary."""
    old, new = two_servers

    async def write(client: Redis) -> Any:
        if not is_pipeline:
            return await client.set("key", "value")
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.set("key", "value")
            return (await pipeline.execute())[0]

    async with Relay.to(_port(old)) as (relay, url):
        client = connect_redis(url)
        assert await write(client)
        _refuse(old, refusal, new)
        relay.port = _port(new)
        with pytest.raises(RedisError) as refused:
            await write(client)
        assert reason_of(refused.value).startswith("Redis refuses: ")
        assert await write(client)
        await client.aclose()
    with BlockingRedis.from_url(new) as server:
        assert server.get("key") == b"value"


@pytest.mark.parametrize("is_accepted", [True, False], ids=["no answer", "no connection"])
async def test_a_silent_server_ends_a_call_within_its_limit(is_accepted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        address = silent.getsockname()
        # The kernel completes as many connections as the backlog holds, and drops the next ones.
        others = [] if is_accepted else [socket.create_connection(address, 1) for _ in range(1)]
        client = connect_redis("redis://{}:{}".format(*address), within_s=0.1)
        with pytest.raises(RedisTimeout):
            await asyncio.wait_for(client.get("key"), WITHIN_S)
        await client.aclose()
        for other in others:
            other.close()


async def test_a_name_that_moves_is_followed_though_the_old_server_answers(
    two_servers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_client, "_MAX_AGE_S", 0.0)
    old, new = two_servers
    async with Relay.to(_port(old)) as (relay, url):
        client = connect_redis(url)
        await client.set("key", "old")
        relay.port = _port(new)
        assert await client.get("key") is None
        await client.aclose()


async def test_a_connection_is_made_again_once_per_age(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(redis_client, "time", clock)
    client = connect_redis(redis_url)
    ids = [await client.client_id()]
    for seconds in (0.0, 11.0, 0.0, 9.0, 2.0):
        clock.now += seconds
        ids.append(await client.client_id())
    await client.aclose()
    first, second, third = dict.fromkeys(ids)
    assert ids == [first, first, second, second, second, third]


async def _renew(redis: Redis) -> None:
    await Membership(redis, name="c", key=_KEY).renew(make_member())


async def _publish_blocks(redis: Redis) -> None:
    await IndexWriter(redis, name="c", replica="decode-0").publish({bytes(16): Tier.DEVICE})


async def _reset_blocks(redis: Redis) -> None:
    await IndexWriter(redis, name="c", replica="decode-0").reset({})


async def _publish_keys(redis: Redis) -> None:
    await KeyPublisher(redis, name="c", signing_key=_KEY).publish(KeyRegistry())


async def _count(redis: Redis) -> None:
    await RevisionChannel(redis, name="c", key=_KEY).tell("router-0", {})


async def _read_revisions(redis: Redis) -> None:
    await RevisionChannel(redis, name="c", key=_KEY).read()


async def _register(redis: Redis) -> None:
    await RouterAddresses(redis, {}, name="c", key=_KEY, router="router-0", address="h:1").renew()


@pytest.mark.parametrize(
    ("key", "write"),
    [
        ("c:members", _renew),
        ("c:member:decode-0", _renew),
        ("c:events", _publish_blocks),
        ("c:events", _reset_blocks),
        ("c:blocks:decode-0:device", _publish_blocks),
        ("c:keys", _publish_keys),
        ("c:revisions", _read_revisions),
        ("c:revisions:counts", _count),
        ("c:routers", _register),
    ],
)
async def test_a_key_of_another_type_is_replaced(
    redis_url: str, key: str, write: Callable[[Redis], Awaitable[None]]
) -> None:
    redis = connect_redis(redis_url)
    await redis.flushall()
    await redis.zadd(key, {"foreign": 1})
    await redis.set("c:other", "kept")
    if key != "c:members":
        await redis.sadd("c:members", "decode-1")  # type: ignore[misc]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await write(redis)
    await write(redis)
    assert await redis.type(key) != b"zset" and await redis.get("c:other") == b"kept"
    assert key == "c:members" or await redis.sismember("c:members", "decode-1")  # type: ignore[misc]
    await redis.aclose()


async def test_a_reason_has_the_servers_words_and_no_bytes_of_the_command(redis_url: str) -> None:
    redis = connect_redis(redis_url)
    await redis.flushall()
    await redis.lpush("list", "one")
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.set("list", b"\x1b[2J\n\xff", get=True)
        with pytest.raises(ResponseError) as refused:
            await pipeline.execute()
    wrong_type = "WRONGTYPE Operation against a key holding the wrong kind of value"
    assert reason_of(refused.value) == f"Redis refuses: {wrong_type}"
    assert reason_of(RedisUnreachable("Error 111\n\x1b")) == "Redis is unreachable: Error 111??"
    await redis.aclose()


@pytest.mark.parametrize(
    ("error", "is_about_the_key"),
    [
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), True),
        (ResponseError("value is not an integer or out of range"), True),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots, but it is unable to persist"), False),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), False),
        (RedisUnreachable("Error 111"), False),
    ],
)
def test_errors_about_one_key_are_no_outage(error: RedisError, is_about_the_key: bool) -> None:
    assert is_about_one_key(error) is is_about_the_key


class _Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_an_outage_is_logged_when_it_begins_changes_and_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(redis_client, "time", clock)
    reach = RedisReach("m")
    with caplog.at_level(logging.INFO):
        for second in range(60):  # reads work, writes are refused, with another reason from second 20 on
            clock.now = 100.0 + second
            error = OutOfMemoryError("full") if second < 20 else RedisUnreachable("gone")
            reach.found("read")
            reach.missed(error, "write")
            assert reach.is_unavailable
        assert reach.problem == "Redis is unreachable: gone"
        for _ in range(6):  # it returns, but not for long
            clock.now += 0.5
            reach.found("write")
            assert not reach.is_unavailable and not reach.problem
            reach.missed(RedisUnreachable("gone"), "write")
        clock.now += 3
        reach.found("write")
        reach.found("write")
    assert caplog.messages == [
        "Redis refuses: full; meanwhile m",
        "Redis is unreachable: gone; meanwhile m",
        "Redis is reachable again",
    ]
