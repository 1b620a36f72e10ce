"""API keys and their counters survive evictions in Redis."""

from __future__ import annotations

from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from core.index.key_channel import KeyPublisher, KeyReader, places_of
from core.index.redis_client import connect_redis
from core.index.redis_server import RedisAddress, RedisServer
from core.process.ports import free_port
from core.types.api_key import KeyRegistry, new_key, new_secret

_SEAL_KEY = bytes(32)


async def test_full_server_evicts_blocks_and_no_api_keys(tmp_path: Path) -> None:
    """The embedded server with less memory: volatile-lru evicts keys with a TTL only."""
    address = RedisAddress(free_port())
    server = RedisServer(address, log=tmp_path / "index.log")
    server.start()
    registry = KeyRegistry(version=1, keys=(new_key("acme", new_secret(), rpm=5),))
    used, running = places_of("d", registry.keys[0].id)
    try:
        retry = Retry(ConstantBackoff(0.05), 1000)
        client = connect_redis(address.url)
        with redis.Redis.from_url(address.url, retry=retry, retry_on_error=[redis.ConnectionError]) as filler:
            publisher = KeyPublisher(client, name="d", signing_key=_SEAL_KEY)
            await publisher.publish(registry)
            filler.hset(used, "r1", 1)
            filler.zadd(running, {"request": 1})
            filler.config_set("maxmemory", filler.info("memory")["used_memory"] + (2 << 20))
            for number in range(200):
                filler.set(f"blocks:{number}", b"x" * 65_536, ex=60)
            assert filler.info("stats")["evicted_keys"] > 100
            assert filler.exists(used, running) == 2
            assert await KeyReader(client, name="d", signing_key=_SEAL_KEY).read() == registry
            await publisher.forget_others({registry.keys[0].id})
            assert filler.exists(used, running) == 2
            await publisher.forget_others(set())
            assert filler.exists(used, running) == 0
        await publisher.close()
    finally:
        server.stop()


async def test_foreign_entries_among_the_counters_are_deleted(redis_url: str) -> None:
    registry = KeyRegistry(version=1, keys=(new_key("acme", new_secret(), rpm=5),))
    client = connect_redis(redis_url)
    await client.flushall()
    publisher = KeyPublisher(client, name="d", signing_key=_SEAL_KEY)
    await publisher.publish(registry)
    [counted] = await client.keys("*counted*")
    await client.sadd(counted, b"\xff")
    await publisher.forget_others({registry.keys[0].id})
    assert await client.smembers(counted) == {registry.keys[0].id.encode()}
    await publisher.close()
