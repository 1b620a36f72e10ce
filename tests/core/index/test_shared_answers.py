"""Messages between replicas through a Redis that may read, change, replay and lose them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from hashlib import blake2b

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from redis.asyncio import Redis

from core.index.redis_client import connect_redis
from core.index.shared_answers import MAX_MESSAGE_BYTES, AnswerStream

_KEY = bytes(range(32))
_STREAM = "c:answers"


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect_redis(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


def _end(redis: Redis, name: str = "c", key: bytes = _KEY) -> AnswerStream:
    return AnswerStream(redis, name=name, key=key)


async def test_other_replicas_read_a_message_exactly_once(redis: Redis) -> None:
    one, other, later = _end(redis), _end(redis), _end(redis)
    await one.write(b"first")
    assert await other.read() == [b"first"]
    await one.write(b"second")
    await other.write(b"third")
    assert await other.read() == [b"second"] and await other.read() == []
    assert await one.read() == [b"third"]
    assert await later.read() == [b"first", b"second", b"third"], "a new reader misses existing messages"


async def test_messages_are_encrypted(redis: Redis) -> None:
    one = _end(redis)
    await one.write(b"a secret of some tenant")
    await one.write(b"a secret of some tenant")
    values = [fields[b"message"] for _, fields in await redis.xrange(_STREAM)]
    assert not any(b"secret" in value for value in values)
    assert values[0][24:] != values[1][24:], "equal messages have equal ciphertexts"


async def test_foreign_messages_are_ignored_and_counted(redis: Redis) -> None:
    one, other = _end(redis), _end(redis)
    await one.write(b"true")
    value = (await redis.xrange(_STREAM))[0][1][b"message"]
    await redis.delete(_STREAM)
    generator = random.Random(0)
    bad = [b"", b"short", value[:24], value[:-1], generator.randbytes(200), generator.randbytes(3 * MAX_MESSAGE_BYTES)]
    bad += [bytes([*value[:i], value[i] ^ 1, *value[i + 1 :]]) for i in (0, 15, 16, 23, 24, len(value) - 1)]
    for lie in bad:
        await redis.xadd(_STREAM, {"message": lie})
    await redis.xadd(_STREAM, {"other": b"a", "fields": b"b"})
    await _end(redis, key=bytes(32)).write(b"of another deployment")
    await redis.xadd(_STREAM, {"message": value})
    assert await other.read() == [b"true"]
    await redis.xadd(_STREAM, {"message": "last"})
    assert await other.read() == [] == await other.read()
    assert other.num_rejected == len(bad) + 3, "a message is counted twice"
    elsewhere = _end(redis, name="d")
    await redis.xadd("d:answers", {"message": value})
    assert await elsewhere.read() == [] and elsewhere.num_rejected == 1, "a message of another stream is accepted"


async def test_replayed_message_is_ignored(redis: Redis) -> None:
    one, other = _end(redis), _end(redis)
    await one.write(b"first")
    await one.write(b"second")
    old = await redis.xrange(_STREAM)
    assert await other.read() == [b"first", b"second"]
    for _, fields in old:
        await redis.xadd(_STREAM, fields)
    assert await other.read() == [] and other.num_rejected == 0


async def test_reading_continues_after_redis_lost_its_data(redis: Redis) -> None:
    one, other = _end(redis), _end(redis)
    await one.write(b"first")
    assert await other.read() == [b"first"]
    await redis.flushall()
    await one.write(b"second")
    assert await other.read() == [b"second"]
    await redis.execute_command("XSETID", _STREAM, "99999999999999-0")
    await one.write(b"third")
    assert await other.read() == [b"third"]
    await redis.flushall()
    await one.write(b"fourth")  # its id is below those read before
    assert b"fourth" in await other.read() + await other.read()


async def test_newest_messages_are_read_and_the_rest_is_counted(redis: Redis) -> None:
    one, other = _end(redis), _end(redis)
    await one.write(b"0")
    assert await other.read() == [b"0"]
    for number in range(1, 51):
        await one.write(str(number).encode())
    found = await other.read()
    assert found == [str(number).encode() for number in range(51 - len(found), 51)]
    assert 0 < len(found) < 50 and other.num_missed == 50 - len(found)


async def test_stream_is_bounded_and_expires(redis: Redis) -> None:
    one = _end(redis)
    for _ in range(2000):
        await one.write(bytes(MAX_MESSAGE_BYTES // 4))
    assert await redis.xlen(_STREAM) < 1700
    assert 0 < await redis.ttl(_STREAM) <= 3600


async def test_skipped_numbers_do_not_overflow_the_counter(redis: Redis) -> None:
    """Metrics have 64 bits; a larger count would break the report."""
    other, writer = _end(redis), bytes(16)
    cipher = AESGCM(blake2b(writer, key=_KEY, digest_size=32, person=b"writer").digest())
    for number in (1, (1 << 64) - 1):
        nonce = number.to_bytes(12, "big")
        signed = cipher.encrypt(nonce, b"some", b"c")
        await redis.xadd(_STREAM, {"message": writer + nonce[4:] + signed})
    assert await other.read() == [b"some", b"some"]
    assert 0 < other.num_missed < 1 << 16
