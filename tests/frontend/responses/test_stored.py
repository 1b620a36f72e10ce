"""Conformance suite of both response stores, and the router's behaviour during a Redis outage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.types.errors import CapacityError, StoreUnavailable, UnknownResponse
from frontend.responses.store import (
    ENTRY_BYTES,
    MAX_VALUE_BYTES,
    SMALL_BYTES,
    RedisResponses,
    ResponseStore,
    StoreBounds,
)
from frontend.responses.stored import LargeTransfers, StoredResponses
from tests.support.memory_responses import FakeResponses, in_memory_responses
from tests.support.redis_at import redis_at
from tests.support.waiting import becomes

_KEY = bytes(range(32))
_TTL_S = 1000.0
_LARGE = b"x" * (3 * ENTRY_BYTES)  # two fill a tenant's share
_BOUNDS = StoreBounds(max_bytes=16 * ENTRY_BYTES, ttl_s=_TTL_S)
_ROOMY = StoreBounds(max_bytes=2**26, ttl_s=_TTL_S)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def now(self) -> float:
        self.seconds += 0.001  # so that no two have the same time
        return self.seconds

    def now_ms(self) -> int:
        return round(self.now() * 1e3)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    redis.Redis.from_url(redis_url).flushall()
    found = connect_redis(redis_url)
    yield found
    await found.aclose()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, clock: Clock, client: Redis) -> ResponseStore:
    if request.param == "memory":
        return FakeResponses(_BOUNDS, now=clock.now)
    return RedisResponses(client, _BOUNDS, name="d", key=_KEY, now_ms=clock.now_ms)


async def found(store: ResponseStore, tenant: str, *ids: str) -> str:
    """Return the ids that are stored."""
    return "".join([id for id in ids if await store.get(tenant, id) is not None])


async def test_values_are_isolated_by_tenant(store: ResponseStore) -> None:
    await store.put("acme", "a", b'{"a":1}')
    await store.put("", "n", b"nobody's")
    assert (await store.get("acme", "a"), await store.get("", "n")) == (b'{"a":1}', b"nobody's")
    for tenant, id in (("other", "a"), ("", "a"), ("acme", "n"), ("acm", "ea"), ("acme", "")):
        assert await store.get(tenant, id) is None and not await store.delete(tenant, id)
    assert await store.delete("acme", "a") and not await store.delete("acme", "a")
    assert await store.get("acme", "a") is None and await store.get("", "n") is not None


async def test_oldest_of_a_tenant_is_evicted_first(store: ResponseStore) -> None:
    await store.put("other", "o", _LARGE)
    for id in "abc":
        await store.put("acme", id, _LARGE)
    assert await found(store, "acme", *"abc") == "bc", "half of the room is a tenant's"
    assert await found(store, "other", "o") == "o", "and no more than its own goes"
    await store.delete("acme", "b")
    await store.put("acme", "d", _LARGE)
    assert await found(store, "acme", *"bcd") == "cd", "deleted values do not count"


async def test_oldest_of_all_tenants_is_evicted_first(store: ResponseStore) -> None:
    for number, tenant in enumerate(["a", "b", "c", "d", "e"]):
        await store.put(tenant, "r", _LARGE)
        assert await found(store, "a", "r") == ("r" if number < 4 else "")
    assert [await found(store, tenant, "r") for tenant in "bcde"] == ["r"] * 4


async def test_number_of_small_values_is_bounded(store: ResponseStore) -> None:
    for number in range(20):
        await store.put("acme", str(number), b"")
    assert [await found(store, "acme", str(number)) for number in (11, 12, 19)] == ["", "12", "19"]


async def test_expired_values_are_removed_on_put(store: ResponseStore, clock: Clock) -> None:
    await store.put("acme", "a", b"1")
    clock.seconds += _TTL_S - 1
    await store.put("other", "b", b"2")
    assert await found(store, "acme", "a") == "a"
    clock.seconds += 2
    await store.put("other", "c", b"3")
    assert (await found(store, "acme", "a"), await found(store, "other", *"bc")) == ("", "bc")


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_size_of_a_large_value_is_known_before_it_is_read(kind: str, client: Redis) -> None:
    store: ResponseStore = FakeResponses(_ROOMY)
    if kind == "redis":
        store = RedisResponses(client, _ROOMY, name="d", key=_KEY)
    for num_bytes in (0, SMALL_BYTES, SMALL_BYTES + 1, MAX_VALUE_BYTES):
        id, value = str(num_bytes), bytes(num_bytes)
        assert await store.look("acme", id) is None
        await store.put("acme", id, value)
        assert await store.look("acme", id) == (value if num_bytes <= SMALL_BYTES else num_bytes)
        assert await store.get("acme", id) == value
    for name in await client.keys("d:response:*"):  # oversized values written by others are not read
        await client.setrange(name, 2 * MAX_VALUE_BYTES, b"!")
    if kind == "redis":
        assert await store.look("acme", str(MAX_VALUE_BYTES)) is None


async def test_large_values_in_memory_are_limited() -> None:
    """One tenant may hold a quarter; small values are exempt."""
    stored = in_memory_responses(_ROOMY)
    for tenant in ("acme", "other", ""):
        assert await stored.put(tenant, "a", bytes(MAX_VALUE_BYTES)) and await stored.put(tenant, "small", b"value")
    with ExitStack() as held:
        for _ in range(8):
            await stored.get("acme", "a", held)
        for _ in range(2):
            with pytest.raises(CapacityError, match="too many large responses"), ExitStack() as more:
                await stored.get("acme", "a", more)
        assert await stored.get("acme", "small", held) == b"value"
        for _ in range(24):
            await stored.get("", "a", held)
        with pytest.raises(CapacityError), ExitStack() as more:
            await stored.get("other", "a", more)
    with ExitStack() as held:
        assert len(await stored.get("acme", "a", held)) == MAX_VALUE_BYTES


class FakeSlowStore(FakeResponses):
    """Store whose reads wait for a signal."""

    def __init__(self) -> None:
        super().__init__(_ROOMY)
        self.go = asyncio.Event()
        self.moving = Counter[str]()  # by tenant

    async def get(self, tenant: str, id: str) -> bytes | None:
        self.moving[tenant] += id == "large"
        await self.go.wait()
        return await super().get(tenant, id)

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        return SMALL_BYTES + 1 if id == "large" else b"value"

    async def put(self, tenant: str, id: str, value: bytes) -> None:
        self.moving[tenant] += len(value) > SMALL_BYTES
        if len(value) > SMALL_BYTES:
            await self.go.wait()
        await super().put(tenant, id, value)


async def test_concurrent_large_transfers_are_limited() -> None:
    """Otherwise small replies, for which routing and limits wait, would be delayed."""
    store = FakeSlowStore()
    stored = StoredResponses(store, _ROOMY)
    large = bytes(SMALL_BYTES + 1)
    with ExitStack() as held:
        puts = [asyncio.create_task(stored.put("greedy", "large", large)) for _ in range(9)]
        gets = [
            asyncio.create_task(stored.get(tenant, "large", held))
            for tenant in ("greedy", "modest", "other", "third")
            for _ in range(3)
        ]
        await becomes(lambda: store.moving.total() == 4)
        assert await stored.get("last", "small", held) == b"value" and await stored.put("last", "small", b"1")
        assert store.moving == {"greedy": 2, "modest": 2, "last": 0}
        store.go.set()
        assert await asyncio.gather(*puts) == [True] * 9
        found = await asyncio.gather(*gets, return_exceptions=True)
        assert found[:3] == [large] * 3 and all(isinstance(error, UnknownResponse) for error in found[3:])


class FakeLateStore(FakeResponses):
    """Store whose large values time out."""

    async def look(self, tenant: str, id: str) -> bytes | int | None:
        return SMALL_BYTES + 1 if id == "large" else await super().look(tenant, id)

    async def get(self, tenant: str, id: str) -> bytes | None:
        if id == "large":
            raise redis.TimeoutError("reading")
        return await super().get(tenant, id)


async def test_timeout_of_a_large_value_does_not_mark_redis_unavailable() -> None:
    """Otherwise a client that reads much would stop storage for all."""
    stored = StoredResponses(FakeLateStore(_ROOMY), _ROOMY)
    with ExitStack() as held, pytest.raises(StoreUnavailable):
        await stored.get("greedy", "large", held)
    assert await stored.put("modest", "a", b"value")


async def test_waiting_for_a_transfer_slot_times_out() -> None:
    transfers = LargeTransfers(within_s=0)
    async with transfers.turn("a"), transfers.turn("a"):
        with pytest.raises(CapacityError):
            async with transfers.turn("a"):
                raise AssertionError("there were two already")
        async with transfers.turn("b"):
            pass
    async with transfers.turn("a"):
        pass


async def test_evicted_values_leave_nothing_in_redis(client: Redis, clock: Clock) -> None:
    store = RedisResponses(client, _BOUNDS, name="d", key=_KEY, now_ms=clock.now_ms)
    for number in range(20):
        await store.put(f"tenant-{number}", "r", b"value")
    entries = await client.keys("d:response:*")
    assert len(entries) == 15 == await client.zcard("d:responses:all")
    assert len(await client.keys("d:responses:of:*")) == 15
    assert await client.hget("d:responses:bytes", "all") == str(15 * (ENTRY_BYTES + 5)).encode()
    assert 0 < await client.pttl(entries[0]) <= _TTL_S * 1e3
    for number in range(20):
        await store.delete(f"tenant-{number}", "r")
    assert await client.keys("*") == []


async def test_redis_names_reveal_no_tenants(client: Redis) -> None:
    store = RedisResponses(client, _BOUNDS, name="d", key=_KEY)
    await store.put("acme", "resp_1", b"value")
    await RedisResponses(client, _BOUNDS, name="d", key=bytes(32)).put("acme", "resp_1", b"another key's")
    entries = await client.keys("d:response:*")
    assert len(entries) == 2 and not any(b"acme" in name or b"resp" in name[10:] for name in entries)
    assert await store.get("acme", "resp_1") == b"value"


async def test_forged_values_are_ignored(client: Redis) -> None:
    store = RedisResponses(client, _BOUNDS, name="d", key=_KEY)
    await store.put("acme", "a", b"one")
    (first,) = await client.keys("d:response:*")
    await store.put("acme", "b", b"two")
    second = next(name for name in await client.keys("d:response:*") if name != first)
    await client.copy(first, second, replace=True)  # a valid signature under another id
    await client.append(first, b"!")
    assert (await store.get("acme", "a"), await store.get("acme", "b")) == (None, None)
    await client.zadd("d:responses:all", {"nonsense": 1, f"{'0' * 32}:{'1' * 32}:7": 2})
    await client.hset("d:responses:bytes", "all", 10**9)
    await store.put("acme", "c", b"three")
    assert await store.get("acme", "c") == b"three"


async def test_two_routers_share_a_store(redis_url: str, client: Redis) -> None:
    one, other = (StoredResponses.in_redis(redis_url, name="d", key=_KEY, bounds=_BOUNDS) for _ in range(2))
    assert await one.put("acme", "a", b"value")
    assert await other.get("acme", "a", ExitStack()) == b"value"
    await other.delete("acme", "a")
    with pytest.raises(UnknownResponse, match="response 'a' not found"):
        await one.get("acme", "a", ExitStack())
    for router in (one, other):
        await router.close()


async def test_values_that_are_not_stored() -> None:
    off = StoredResponses.in_redis("redis://nowhere", name="d", key=_KEY, bounds=StoreBounds(max_bytes=0, ttl_s=1))
    assert not off.stores and not await off.put("", "a", b"")
    with pytest.raises(UnknownResponse, match="stored_responses_mib"):
        await off.get("", "a", ExitStack())
    with pytest.raises(UnknownResponse):
        await off.delete("", "a")
    roomy = in_memory_responses(StoreBounds(max_bytes=2**30, ttl_s=1))
    assert not await roomy.put("", "a", bytes(MAX_VALUE_BYTES + 1)) and await roomy.put("", "a", bytes(MAX_VALUE_BYTES))
    small = in_memory_responses(_BOUNDS)
    assert not await small.put("", "a", bytes(7 * ENTRY_BYTES + 1)) and await small.put("", "a", bytes(7 * ENTRY_BYTES))


async def test_redis_outage_and_recovery(tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port('127.0.0.1')}/0"
    stored = StoredResponses.in_redis(nowhere, name="d", key=_KEY, bounds=_BOUNDS)
    assert not await stored.put("", "a", b"value")
    with pytest.raises(StoreUnavailable):
        await stored.get("", "a", ExitStack())
    await stored.close()
    with redis_at("127.0.0.1", tmp_path) as url:
        redises = connect_redis(url)
        stored = StoredResponses(RedisResponses(redises, _BOUNDS, name="d", key=_KEY), _BOUNDS, redises, try_again_s=0)
        assert await stored.put("", "a", b"value")
    with pytest.raises(StoreUnavailable):
        await stored.get("", "a", ExitStack())
    with pytest.raises(StoreUnavailable):
        await stored.delete("", "a")
    await stored.close()


@pytest.mark.parametrize("key", ["d:responses:all", "d:responses:bytes"])
async def test_table_of_another_type_is_replaced(redis_url: str, client: Redis, key: str) -> None:
    stored = StoredResponses.in_redis(redis_url, name="d", key=_KEY, bounds=_ROOMY)
    await client.set(key, "foreign")
    assert not await stored.put("acme", "a", b"{}")
    assert await stored.put("acme", "a", b"{}")
    await stored.close()
