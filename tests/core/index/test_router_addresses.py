"""Every router of a deployment lists the admin addresses of all its routers, and of no others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import redis

from core.index import router_addresses
from core.index.redis_client import connect_redis
from core.index.router_addresses import RouterAddresses
from tests.support.redis_at import redis_at
from tests.support.waiting import becomes

_KEY = b"k" * 32


@asynccontextmanager
async def _router(redis_url: str, router: str, address: str, *, key: bytes = _KEY) -> AsyncIterator[dict[str, str]]:
    known: dict[str, str] = {}
    addresses = RouterAddresses(connect_redis(redis_url), known, name="d", key=key, router=router, address=address)
    running = asyncio.create_task(addresses.run())
    try:
        yield known
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await addresses.close()


async def test_routers_see_each_other_until_one_leaves(redis_url: str) -> None:
    redis.Redis.from_url(redis_url).flushall()
    async with _router(redis_url, "router-a", "127.0.0.1:1") as first:
        assert first == {"router-a": "127.0.0.1:1"}, "its own address, before the first read"
        async with _router(redis_url, "router-b", "127.0.0.1:2") as second:
            both = {"router-a": "127.0.0.1:1", "router-b": "127.0.0.1:2"}
            await becomes(lambda: second == both)
        await becomes(lambda: redis.Redis.from_url(redis_url).smembers("d:routers") == {b"router-a"})


async def test_known_addresses_stay_through_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_addresses, "_RENEW_S", 0.05)
    both = {"router-a": "127.0.0.1:1", "router-b": "127.0.0.1:2"}
    async with AsyncExitStack() as stack:
        with redis_at("127.0.0.1", tmp_path) as url:
            first = await stack.enter_async_context(_router(url, "router-a", "127.0.0.1:1"))
            await stack.enter_async_context(_router(url, "router-b", "127.0.0.1:2"))
            await becomes(lambda: first == both)
        await becomes(lambda: "the addresses of other routers stay as they are" in caplog.text)
        assert first == both


async def test_unsigned_router_record_is_ignored(redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.flushall()
    for name, record in {
        "clear": json.dumps({"router": "clear", "address": "evil:1"}).encode(),
        "long": b"x" * 5000,
        "empty": b"",
    }.items():
        client.set(f"d:router:{name}", record)
        client.sadd("d:routers", name)
    async with (
        _router(redis_url, "stranger", "evil:2", key=b"x" * 32),
        _router(redis_url, "router-a", "127.0.0.1:1"),
    ):
        await becomes(lambda: client.smembers("d:routers") >= {b"stranger", b"router-a"})
        client.set("d:router:copied", client.get("d:router:router-a") or b"")  # a signed record under another name
        client.sadd("d:routers", "copied")
        async with _router(redis_url, "router-c", "127.0.0.1:3") as known:
            await becomes(lambda: len(known) > 1)
            assert known == {"router-a": "127.0.0.1:1", "router-c": "127.0.0.1:3"}
