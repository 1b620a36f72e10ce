"""The store of batches: one answer to a line, one lease on a batch, seals, and what goes when its time is up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis
from redis.asyncio import Redis

from core.index.redis_client import connect_redis
from router.batches.bounds import BatchBounds
from router.batches.records import BatchMade, BatchState, FileRecord
from router.batches.redis_batches import HashedPlace, RedisBatches

_KEY = bytes(range(32))
_BOUNDS = BatchBounds(max_bytes=2**20)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    redis.Redis.from_url(redis_url).flushall()
    found = connect_redis(redis_url)
    yield found
    await found.aclose()


@pytest.fixture
def store(client: Redis) -> RedisBatches:
    return RedisBatches(client, _BOUNDS, name="d", key=_KEY)


async def made_file(store: RedisBatches, tenant: str, id: str, *, keep_s: float = 1000.0) -> HashedPlace:
    place = store.place(tenant, id)
    assert await store.put_part(place, 0, b"hello") == "put"
    record = FileRecord(id=id, name="f", purpose="batch", num_bytes=5, num_parts=1, created_at=0, expires_at=1)
    assert await store.put_file(place, record, keep_s=keep_s) == "put"
    return place


async def made_batch(store: RedisBatches, tenant: str, id: str) -> tuple[HashedPlace, BatchMade]:
    file = await made_file(store, tenant, f"{id}-in")
    made = BatchMade(
        id=id,
        tenant=tenant,
        key_id="",
        endpoint="/v1/completions",
        input_file_id=f"{id}-in",
        output_file_id=f"{id}-out",
        error_file_id=f"{id}-err",
        created_at=0,
        expires_at=1,
    )
    place = store.place(tenant, id)
    assert await store.create(place, made, input_file=file, keep_input_s=1000.0) == "put"
    return place, made


async def test_a_line_has_one_answer_and_only_who_has_the_lease_gives_it(store: RedisBatches) -> None:
    batch, made = await made_batch(store, "acme", "b")
    assert await store.record(batch, "one", made, line=1, answer=b"early", is_error=False) == "lost"
    assert await store.claim("one", lease_s=1000.0, tenants=[]) == batch
    assert await store.record(batch, "one", made, line=1, answer=b"first", is_error=False) == "put"
    for is_error in (False, True):
        assert await store.record(batch, "one", made, line=1, answer=b"again", is_error=is_error) == "put"
        assert await store.record(batch, "two", made, line=2, answer=b"stranger", is_error=is_error) == "lost"
    assert await store.record(batch, "one", made, line=2, answer=b"wrong", is_error=True) == "put"
    record = await store.batch(batch)
    assert record and (record.num_completed, record.num_failed) == (1, 1)
    out, err = (store.place("acme", id) for id in ("b-out", "b-err"))
    assert (await store.numbers(out), await store.numbers(err)) == ([1], [2])
    assert [part async for part in store.parts(out, [1], part_bytes=5)] == [b"first"]
    assert await store.file(out) is None, "nobody can ask for it yet"


async def test_a_lease_is_one_routers_until_it_ends_or_is_given_back(store: RedisBatches) -> None:
    batch, made = await made_batch(store, "acme", "b")
    assert await store.claim("one", lease_s=1000.0, tenants=[]) == batch
    assert await store.claim("two", lease_s=1000.0, tenants=[]) is None
    assert await store.renew(batch, "one", lease_s=0.0) == "held"
    assert await store.claim("two", lease_s=1000.0, tenants=[batch.tenant]) is None, "it has one of that tenant"
    assert await store.claim("two", lease_s=1000.0, tenants=[]) == batch, "the first one's has ended"
    assert await store.renew(batch, "one", lease_s=1000.0) == "lost"
    assert await store.set_state(batch, "one", BatchState(status="in_progress")) == "lost"
    assert await store.finish(batch, "one", BatchState(status="completed"), [], "acme") == "lost"
    await store.release(batch, "one")
    assert await store.claim("three", lease_s=1000.0, tenants=[]) is None, "it was not the first one's to give back"
    await store.release(batch, "two")
    assert await store.claim("three", lease_s=1000.0, tenants=[]) == batch
    assert await store.cancel(batch, at=5) and await store.renew(batch, "three", lease_s=1000.0) == "cancel"
    assert await store.finish(batch, "three", BatchState(status="cancelled"), [], "acme") == "put"
    assert await store.record(batch, "three", made, line=1, answer=b"late", is_error=False) == "lost"
    assert not await store.cancel(batch, at=6) and await store.claim("four", lease_s=1.0, tenants=[]) is None


async def test_what_was_changed_or_moved_in_redis_is_not_there(store: RedisBatches, client: Redis) -> None:
    batch, _ = await made_batch(store, "acme", "b")
    file, other = store.place("acme", "b-in"), await made_file(store, "other", "f")
    await client.hset("d:offline:file:{}:{}".format(*file), "record", b"x" * 80)
    assert await store.file(file) is None
    moved = await client.hget("d:offline:data:{}:{}".format(*file), "0")
    await client.hset("d:offline:data:{}:{}".format(*other), mapping={"0": moved, "1": moved})
    assert [part async for part in store.parts(other, [0, 1], part_bytes=5)] == []
    await client.hset("d:offline:batch:{}:{}".format(*batch), "state", b"completed")
    record = await store.batch(batch)
    assert record and record.state == BatchState(), "it begins anew, and is not believed to be over"
    assert not [key for key in await client.keys("*") if b"acme" in key or b"b-in" in key], "nor are names told"


async def test_what_has_ended_goes_with_all_of_it(store: RedisBatches, client: Redis) -> None:
    batch, made = await made_batch(store, "acme", "b")
    await made_file(store, "acme", "soon", keep_s=0.0)
    await store.sweep()
    assert await store.file(store.place("acme", "soon")) is None
    assert await store.file(store.place("acme", "b-in")) is not None
    brief = RedisBatches(client, BatchBounds(max_bytes=2**20, keep_s=0.0), name="d", key=_KEY)
    assert await brief.claim("one", lease_s=1000.0, tenants=[]) == batch
    await brief.record(batch, "one", made, line=1, answer=b"x", is_error=False)
    out = FileRecord(id="b-out", name="o", purpose="o", num_bytes=1, num_parts=1, created_at=0, expires_at=1)
    assert await brief.finish(batch, "one", BatchState(status="completed"), [out], "acme") == "put"
    assert await store.file(store.place("acme", "b-out")) == out
    assert await store.drop_file(store.place("acme", "b-in")) and not await store.drop_file(store.place("acme", "b-in"))
    await brief.sweep()
    assert await client.keys("*") == []


async def test_a_file_outlives_the_batch_that_reads_it(store: RedisBatches, client: Redis) -> None:
    file = await made_file(store, "acme", "f", keep_s=0.0)
    made = BatchMade(
        id="b",
        tenant="acme",
        key_id="",
        endpoint="e",
        input_file_id="f",
        output_file_id="o",
        error_file_id="r",
        created_at=0,
        expires_at=1,
    )
    assert await store.create(store.place("acme", "b"), made, input_file=file, keep_input_s=1000.0) == "put"
    await store.sweep()
    assert await store.file(file) is not None
    assert await store.create(store.place("other", "b"), made, input_file=file, keep_input_s=1.0) == "unknown"
