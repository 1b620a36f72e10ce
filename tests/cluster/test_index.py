"""The prefix index: in memory by property, through a real server by scenario."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from cluster.index import IndexReader, IndexWriter, PrefixIndex

_HASHES = [bytes([i]) * 16 for i in range(40)]

_operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "drop"]),
        st.sampled_from([f"r{i}" for i in range(6)]),
        st.lists(st.sampled_from(_HASHES), max_size=12),
    ),
    max_size=40,
)


@given(_operations, st.lists(st.sampled_from(_HASHES), max_size=12))
def test_match_agrees_with_a_plain_table(operations: list[tuple[str, str, list[bytes]]], prefix: list[bytes]) -> None:
    index, table = PrefixIndex(), dict[str, set[bytes]]()
    for name, replica, hashes in operations:
        held = table.setdefault(replica, set())
        if name == "store":
            index.store(replica, hashes)
            held.update(hashes)
        elif name == "remove":
            index.remove(replica, hashes)
            held.difference_update(hashes)
        else:
            index.drop(replica)
            held.clear()
    expected = {}
    for replica, held in table.items():
        depth = next((i for i, prefix_hash in enumerate(prefix) if prefix_hash not in held), len(prefix))
        if depth:
            expected[replica] = depth
    assert index.match(prefix) == expected


@given(st.integers(1, 60))
def test_the_dead_do_not_pile_up(generations: int) -> None:
    index = PrefixIndex()
    index.store("long-lived", _HASHES[:4])
    for generation in range(generations):
        index.store(f"r{generation}", _HASHES)
        index.drop(f"r{generation}")
    index.store("new", _HASHES[:1])
    index.drop("new")
    assert len(index) <= 4 + len(_HASHES)
    assert index.match(_HASHES) == {"long-lived": 4}


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
        yield client


def _reader(redis: Redis) -> tuple[PrefixIndex, IndexReader]:
    index = PrefixIndex()
    return index, IndexReader(redis, index, name="c")


async def test_a_reader_sees_what_writers_publish(redis: Redis) -> None:
    index, reader = _reader(redis)
    a, b = (IndexWriter(redis, name="c", replica=name) for name in "ab")
    await a.reset([])
    await reader.follow([], wait_ms=1)
    await a.publish(stored=_HASHES[:3], removed=[])
    await b.publish(stored=_HASHES[:2], removed=[])
    await a.publish(stored=[], removed=_HASHES[2:3])
    await reader.follow(["a", "b"], wait_ms=100)
    assert index.match(_HASHES) == {"a": 2, "b": 2}


async def test_a_reader_that_comes_late_reads_the_sets(redis: Redis) -> None:
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(stored=_HASHES[:5], removed=[])
    await writer.publish(stored=[], removed=_HASHES[4:5])
    index, reader = _reader(redis)
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 4}


async def test_a_reader_that_missed_events_reads_the_sets(redis: Redis) -> None:
    index, reader = _reader(redis)
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(stored=_HASHES[:1], removed=[])
    await reader.follow(["a"], wait_ms=1)
    await writer.publish(stored=_HASHES[1:4], removed=[])
    await writer.publish(stored=_HASHES[4:5], removed=[])
    await redis.xtrim("c:events", maxlen=1, approximate=False)
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 5}


async def test_when_redis_begins_anew_what_is_known_holds_until_the_replicas_have_written_again(redis: Redis) -> None:
    index, reader = _reader(redis)
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(stored=_HASHES[:8], removed=[])
    await reader.follow(["a"], wait_ms=1)
    await redis.flushall()
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 8}
    await writer.reset(_HASHES[:6])
    await reader.follow(["a"], wait_ms=100)
    assert index.match(_HASHES) == {"a": 6}


async def test_reset_forgets_what_came_before(redis: Redis) -> None:
    index, reader = _reader(redis)
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(stored=_HASHES[:8], removed=[])
    await reader.follow(["a"], wait_ms=1)
    await writer.reset(_HASHES[:2])
    await reader.follow(["a"], wait_ms=100)
    assert index.match(_HASHES) == {"a": 2}


async def test_following_waits_for_news(redis: Redis) -> None:
    index, reader = _reader(redis)
    await reader.follow([], wait_ms=1)
    waiting = asyncio.create_task(reader.follow([], wait_ms=5000))
    await IndexWriter(redis, name="c", replica="a").publish(stored=_HASHES[:1], removed=[])
    await asyncio.wait_for(waiting, 3)
    assert index.match(_HASHES) == {"a": 1}


def test_what_is_expected_counts_until_it_is_settled() -> None:
    index = PrefixIndex()
    index.store("a", _HASHES[:2])
    index.expect("a", _HASHES[:5])
    assert index.match(_HASHES) == {"a": 5}
    index.store("a", _HASHES[2:4])
    index.settle("a", _HASHES[:5])
    assert index.match(_HASHES) == {"a": 4}
    index.expect("a", _HASHES[:8])
    index.drop("a")
    index.settle("a", _HASHES[:8])
    assert index.match(_HASHES) == {}


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_a_long_prefix_is_matched_to_the_block(held: list[int]) -> None:
    prefix = [i.to_bytes(16, "big") for i in range(700)]
    index = PrefixIndex()
    for replica, depth in enumerate(held):
        index.store(f"r{replica}", prefix[:depth])
    assert index.match(prefix) == {f"r{replica}": depth for replica, depth in enumerate(held) if depth}
