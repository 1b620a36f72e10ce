"""Prefix index: property tests in memory, scenarios through a real server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from core.index.prefix_index import Depths, PrefixIndex
from core.index.store import IndexReader, IndexWriter
from core.types.prefix_hash import checkpoint_hash, expected_hashes
from core.types.tier import Tier

_HASHES = [bytes([i]) * 16 for i in range(40)]

_operations = st.lists(
    st.tuples(
        st.sampled_from([*Tier, None, "drop"]),
        st.sampled_from([f"r{i}" for i in range(6)]),
        st.lists(st.sampled_from(_HASHES), max_size=12),
    ),
    max_size=40,
)


@given(_operations, st.lists(st.sampled_from(_HASHES), max_size=12))
def test_depths_agree_with_a_plain_table(operations: list[tuple[Any, str, list[bytes]]], prefix: list[bytes]) -> None:
    index, table = PrefixIndex(), dict[str, dict[bytes, Tier]]()
    for change, replica, hashes in operations:
        held = table.setdefault(replica, {})
        if change == "drop":
            index.drop(replica)
            held.clear()
        elif change is None:
            index.remove(replica, hashes)
            table[replica] = {prefix_hash: tier for prefix_hash, tier in held.items() if prefix_hash not in hashes}
        else:
            index.store(replica, hashes, change)
            held.update(dict.fromkeys(hashes, change))
    expected = {replica: _depths(held, prefix) for replica, held in table.items()}
    assert index.depths(prefix) == {replica: depths for replica, depths in expected.items() if any(depths)}


def _depths(held: dict[bytes, Tier], prefix: list[bytes]) -> Depths:
    def leading(lowest: Tier) -> int:
        return next((i for i, h in enumerate(prefix) if held.get(h, lowest + 1) > lowest), len(prefix))

    return Depths(*(leading(tier) for tier in Tier))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(_HASHES[:8]), st.booleans()), max_size=60))
def test_a_prefix_ends_behind_the_last_checkpoints(changes: list[tuple[str, bytes, bool]]) -> None:
    index, prefix = PrefixIndex(), _HASHES[:8]
    blocks, checkpoints = set[tuple[str, bytes]](), set[tuple[str, bytes]]()
    for replica, prefix_hash, is_checkpoint in changes:
        index.store(replica, [checkpoint_hash(prefix_hash) if is_checkpoint else prefix_hash])
        (checkpoints if is_checkpoint else blocks).add((replica, prefix_hash))
    expected = dict[str, Depths]()
    for replica in "abc":
        num_held = next((i for i, block in enumerate(prefix) if (replica, block) not in blocks), len(prefix))
        needed = {"a": 1, "b": 2, "c": 0}[replica]
        runs = {i + 1: prefix[max(0, i + 1 - needed) : i + 1] for i in range(num_held)}
        ends = [end for end, run in runs.items() if all((replica, one) in checkpoints for one in run)]
        depth = num_held if replica == "c" else max(ends, default=0)
        if num_held:
            expected[replica] = Depths(depth, depth, depth, blocks=0 if replica == "c" else num_held)
    ends = [checkpoint_hash(prefix_hash) for prefix_hash in prefix]
    assert index.depths_to_checkpoints(prefix, ends, among={"a": 1, "b": 2}) == expected, "c reports no checkpoints"


@pytest.mark.parametrize(
    ("num_tokens", "num_needed", "kept"),
    [(15, 1, []), (16, 1, []), (17, 1, [0]), (32, 1, [0]), (33, 1, [1]), (33, 0, []), (49, 2, [1, 2]), (33, 5, [0, 1])],
)
def test_a_computed_prompt_has_checkpoints_before_its_last_token(
    num_tokens: int, num_needed: int, kept: list[int]
) -> None:
    blocks = _HASHES[: num_tokens // 16]
    checkpoints = [checkpoint_hash(block) for block in blocks]
    sizes = {"num_tokens": num_tokens, "block_size": 16, "num_checkpoints": num_needed}
    assert expected_hashes(blocks, **sizes) == [*blocks, *(checkpoints[place] for place in kept)]


@given(st.integers(1, 60))
def test_entries_of_dead_replicas_are_swept(generations: int) -> None:
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


# Contract: a router knows exactly what the replicas published through Redis.


class _ThroughRedis:
    def __init__(self, redis: Redis) -> None:
        self.index, self._reader = _reader(redis)
        self._redis = redis
        self._writers: dict[str, IndexWriter] = {}

    def _writer(self, replica: str) -> IndexWriter:
        return self._writers.setdefault(replica, IndexWriter(self._redis, name="c", replica=replica))

    async def publish(self, replica: str, changes: Mapping[bytes, Tier | None]) -> None:
        await self._writer(replica).publish(changes)

    async def reset(self, replica: str, held: Mapping[bytes, Tier]) -> None:
        await self._writer(replica).reset(held)

    async def forget(self, replica: str) -> None:
        await self._reader.forget(replica)

    async def settle(self) -> None:
        await self._reader.follow(list(self._writers), wait_ms=1)


class _ThroughRedisLate(_ThroughRedis):
    """A router that starts after everything was written."""

    async def settle(self) -> None:
        self.index, self._reader = _reader(self._redis)
        await super().settle()


@pytest.fixture(params=[_ThroughRedis, _ThroughRedisLate], ids=["followed", "read later"])
def world(request: pytest.FixtureRequest, redis: Redis) -> _ThroughRedis:
    made: _ThroughRedis = request.param(redis)
    return made


def _in(tier: Tier | None, *numbers: int) -> dict[bytes, Tier | None]:
    return {_HASHES[number]: tier for number in numbers}


async def test_contract_stored_blocks_are_found(world: _ThroughRedis) -> None:
    await world.publish("a", _in(Tier.DEVICE, 0, 1, 2))
    await world.publish("b", _in(Tier.DEVICE, 0, 1))
    await world.publish("a", _in(None, 2))
    await world.settle()
    assert world.index.match(_HASHES) == {"a": 2, "b": 2}


async def test_contract_a_block_that_moves_is_in_one_tier(world: _ThroughRedis) -> None:
    await world.publish("a", _in(Tier.DEVICE, *range(6)))
    await world.settle()
    await world.publish("a", {**_in(Tier.DISK, 4, 5), **_in(Tier.HOST, 2, 3)})
    await world.settle()
    assert world.index.depths(_HASHES) == {"a": Depths(2, 4, 6)}
    await world.publish("a", {**_in(Tier.DEVICE, 2), **_in(None, 5)})
    await world.settle()
    assert world.index.depths(_HASHES) == {"a": Depths(3, 4, 5)}


async def test_contract_reset_replaces_all_blocks(world: _ThroughRedis) -> None:
    await world.publish("a", _in(Tier.DEVICE, *range(8)))
    await world.settle()
    await world.reset("a", {_HASHES[0]: Tier.DEVICE, _HASHES[1]: Tier.DISK})
    await world.publish("a", _in(Tier.HOST, 1))
    await world.settle()
    assert world.index.depths(_HASHES) == {"a": Depths(1, 2, 2)}
    await world.reset("a", {})
    await world.settle()
    assert world.index.depths(_HASHES) == {}


async def test_contract_dropped_replica_holds_nothing(world: _ThroughRedis) -> None:
    await world.publish("a", _in(Tier.HOST, *range(8)))
    await world.publish("b", _in(Tier.DEVICE, 0))
    await world.settle()
    await world.forget("a")
    await world.settle()
    assert world.index.depths(_HASHES) == {"b": Depths(1, 1, 1)}


async def test_contract_many_blocks_at_once(world: _ThroughRedis) -> None:
    many = [number.to_bytes(16, "big") for number in range(3000)]
    await world.publish("a", dict.fromkeys(many, Tier.DEVICE))
    await world.settle()
    assert world.index.match(many) == {"a": 3000}
    await world.reset("b", dict.fromkeys(many[:2500], Tier.HOST))
    await world.settle()
    assert world.index.depths(many) == {"a": Depths(3000, 3000, 3000), "b": Depths(0, 2500, 2500)}


# Redis only: restarts of a reader and of Redis.


def _reader(redis: Redis) -> tuple[PrefixIndex, IndexReader]:
    index = PrefixIndex()
    return index, IndexReader(redis, index, name="c")


async def test_a_reader_that_missed_events_reads_the_sets(redis: Redis) -> None:
    index, reader = _reader(redis)
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(dict.fromkeys(_HASHES[:1], Tier.DEVICE))
    await reader.follow(["a"], wait_ms=1)
    await writer.publish(dict.fromkeys(_HASHES[1:4], Tier.DEVICE))
    await writer.publish(dict.fromkeys(_HASHES[4:5], Tier.DEVICE))
    await redis.xtrim("c:events", maxlen=1, approximate=False)
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 5}


async def test_index_survives_a_redis_restart_until_replicas_rewrite(redis: Redis) -> None:
    index, reader = _reader(redis)
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.publish(dict.fromkeys(_HASHES[:8], Tier.DEVICE))
    await reader.follow(["a"], wait_ms=1)
    await redis.flushall()
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 8}
    await writer.reset(dict.fromkeys(_HASHES[:6], Tier.DEVICE))
    await reader.follow(["a"], wait_ms=100)
    assert index.match(_HASHES) == {"a": 6}


async def test_a_stream_that_begins_again_with_older_ids_is_read_from_its_start(redis: Redis) -> None:
    """Ids are times: those of a new server, or after its clock was set back, may be older than the last one read."""
    index, reader = _reader(redis)
    await IndexWriter(redis, name="c", replica="a").publish({_HASHES[0]: Tier.DEVICE})
    await reader.follow(["a"], wait_ms=1)
    await redis.flushall()
    for number in (1, 2):
        await redis.xadd("c:events", {"replica": "a", "device": _HASHES[number]}, id=f"5-{number}")
    await reader.follow(["a"], wait_ms=100)
    assert index.match(_HASHES) == {"a": 3}


async def test_renew_reports_an_evicted_set(redis: Redis) -> None:
    writer = IndexWriter(redis, name="c", replica="a")
    await writer.reset({_HASHES[0]: Tier.DEVICE})
    assert await writer.renew()
    await redis.delete("c:blocks:a:device")
    assert not await writer.renew()
    await writer.reset({_HASHES[0]: Tier.DISK})
    await writer.publish({_HASHES[0]: None})
    assert await writer.renew()  # an empty set does not exist in Redis and is not lost


async def test_a_dead_replica_leaves_no_key_behind(redis: Redis) -> None:
    await IndexWriter(redis, name="c", replica="a").reset({_HASHES[0]: Tier.DEVICE, _HASHES[1]: Tier.HOST})
    _, reader = _reader(redis)
    await reader.forget("a")
    assert await redis.keys("c:blocks:*") == []


@pytest.mark.parametrize(
    "event",
    [
        {"x": "y"},
        {"replica": b"\xff", "device": _HASHES[1]},
        {"replica": "a", "device": b"half a hash"},
        {"replica": "b", "reset": "1"},
    ],
    ids=str,
)
async def test_malformed_event_is_skipped(redis: Redis, event: dict[Any, Any]) -> None:
    index, reader = _reader(redis)
    await reader.follow(["a", "b"], wait_ms=1)
    await redis.set("c:blocks:b:device", "not a set")
    await redis.xadd("c:events", event)
    await IndexWriter(redis, name="c", replica="a").publish(dict.fromkeys(_HASHES[:1], Tier.DEVICE))
    for _ in range(2):
        await reader.follow(["a", "b"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 1}
    assert reader.num_rejected == 1


async def test_unknown_event_fields_are_ignored(redis: Redis) -> None:
    index, reader = _reader(redis)
    await reader.follow(["a"], wait_ms=1)
    event: dict[Any, Any] = {"replica": "a", "device": _HASHES[0], "remote": b"12", "epoch": b"7"}
    await redis.xadd("c:events", event)
    await reader.follow(["a"], wait_ms=1)
    assert (index.match(_HASHES), reader.num_rejected) == ({"a": 1}, 0)


async def test_replicas_that_are_not_members_hold_nothing(redis: Redis) -> None:
    index, reader = _reader(redis)
    await reader.follow(["a"], wait_ms=1)
    for replica in ("a", "b", "ghost"):
        writer = IndexWriter(redis, name="c", replica=replica)
        await writer.publish({_HASHES[0]: Tier.DEVICE})
        await writer.reset({_HASHES[0]: Tier.DEVICE})
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 1}
    await reader.load(["b"])  # newly discovered: its earlier blocks are in its sets
    await IndexWriter(redis, name="c", replica="b").publish({_HASHES[1]: Tier.DEVICE})
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 1, "b": 2}
    await reader.forget("b")
    await IndexWriter(redis, name="c", replica="b").publish({_HASHES[1]: Tier.DEVICE})
    await reader.follow(["a"], wait_ms=1)
    assert index.match(_HASHES) == {"a": 1}


async def test_load_does_not_overwrite_newer_events(redis: Redis) -> None:
    class Slow:
        """Redis whose scans are slow."""

        def __getattr__(self, name: str) -> Any:
            return getattr(redis, name)

        async def sscan_iter(self, name: str, *, count: int) -> AsyncIterator[bytes]:
            async for prefix_hash in redis.sscan_iter(name, count=count):
                scanned.set()
                await go_on.wait()
                yield prefix_hash

        async def xread(self, *arguments: Any, **more: Any) -> Any:
            answer = await redis.xread(*arguments, **more)
            read.set()
            return answer

    scanned, read, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    slow: Any = Slow()
    index, reader = _reader(slow)
    writer = IndexWriter(redis, name="c", replica="a")
    await reader.follow([], wait_ms=1)
    await writer.publish({_HASHES[0]: Tier.DEVICE})
    await reader.follow([], wait_ms=1)
    loading = asyncio.create_task(reader.load(["a"]))
    await scanned.wait()
    await writer.publish({_HASHES[1]: Tier.DEVICE})
    read.clear()
    following = asyncio.create_task(reader.follow(["a"], wait_ms=1))
    await read.wait()
    await asyncio.sleep(0)  # let the scan return
    go_on.set()
    await asyncio.gather(loading, following)
    assert index.match(_HASHES) == {"a": 2}


async def test_follow_waits_for_events(redis: Redis) -> None:
    index, reader = _reader(redis)
    await reader.follow(["a"], wait_ms=1)
    waiting = asyncio.create_task(reader.follow(["a"], wait_ms=5000))
    await IndexWriter(redis, name="c", replica="a").publish(dict.fromkeys(_HASHES[:1], Tier.DEVICE))
    await asyncio.wait_for(waiting, 3)
    assert index.match(_HASHES) == {"a": 1}


def test_expected_blocks_count_until_settled() -> None:
    index = PrefixIndex()
    index.store("a", _HASHES[:2])
    index.expect("a", _HASHES[:5])
    assert index.match(_HASHES) == {"a": 5}
    index.store("a", _HASHES[2:4])
    index.settle("a", _HASHES[:5])
    assert index.match(_HASHES) == {"a": 4}
    index.store("a", _HASHES[4:6], Tier.HOST)
    index.expect("a", _HASHES[:8])
    assert index.match(_HASHES) == {"a": 8}
    index.settle("a", _HASHES[:8])
    assert index.depths(_HASHES) == {"a": Depths(4, 6, 6)}
    index.expect("a", _HASHES[:8])
    index.drop("a")
    index.settle("a", _HASHES[:8])
    assert index.match(_HASHES) == {}


@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_a_long_prefix_is_matched_to_the_block(held: list[int]) -> None:
    prefix = [i.to_bytes(16, "big") for i in range(700)]
    index = PrefixIndex()
    for replica, depth in enumerate(held):
        index.store(f"r{replica}", prefix[:depth])
    assert index.match(prefix) == {f"r{replica}": depth for replica, depth in enumerate(held) if depth}
