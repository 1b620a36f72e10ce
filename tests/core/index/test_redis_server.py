"""Embedded Redis: a real server, private, that never outlives its owner, restarts, and evicts no API keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from core.index.embedded import EmbeddedIndex
from core.index.key_channel import KeyPublisher, KeyReader, places_of
from core.index.redis_client import connect_redis
from core.index.redis_server import RedisAddress, RedisServer, ping
from core.process.ports import free_port
from core.types.api_key import KeyRegistry, new_key, new_secret
from core.types.errors import DeployError
from tests.support.waiting import WITHIN_S, becomes, until


def connect(address: RedisAddress) -> redis.Redis:
    return redis.Redis.from_url(
        address.url, retry=Retry(ConstantBackoff(0.05), 1000), retry_on_error=[redis.ConnectionError]
    )


@pytest.fixture
def address() -> RedisAddress:
    return RedisAddress(free_port())


def test_server_evicts_only_keys_with_a_ttl(address: RedisAddress, tmp_path: Path) -> None:
    server = RedisServer(address, log=tmp_path / "index.log")
    server.start()
    try:
        with connect(address) as client:
            client.xadd("events", {"op": "stored"})
            assert client.xlen("events") == 1
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}
            assert client.config_get("save") == {"save": ""}
        pending_peer = redis.Redis(port=address.port, retry=Retry(ConstantBackoff(0), 0))
        with pending_peer, pytest.raises(redis.AuthenticationError):
            pending_peer.ping()
    finally:
        server.stop()


def test_server_listens_on_its_address(address: RedisAddress, tmp_path: Path) -> None:
    elsewhere = RedisAddress(address.port, host="127.0.0.2")
    server = RedisServer(elsewhere, log=tmp_path / "index.log")
    server.start()
    try:
        ping(elsewhere.url, within_s=WITHIN_S)
        with pytest.raises(DeployError, match=f"no Redis answers at redis://127.0.0.1:{address.port}/0"):
            ping(address.url, within_s=WITHIN_S)
    finally:
        server.stop()


def test_directory_name_may_contain_any_character(address: RedisAddress, tmp_path: Path) -> None:
    directory = tmp_path / 'of "anybody" \\ für alle'
    server = RedisServer(address, log=directory / "index.log")
    server.start()
    try:
        with connect(address) as client:
            assert client.config_get("dir") == {"dir": str(directory)}
    finally:
        server.stop()


def test_a_port_in_use_is_explained(address: RedisAddress, tmp_path: Path) -> None:
    server = RedisServer(address, log=tmp_path / "index.log")
    server.start()
    try:
        with pytest.raises(DeployError, match=f"did not start on port {address.port}: .*"):
            RedisServer(RedisAddress(address.port), log=tmp_path / "second.log").start()
    finally:
        server.stop()


def test_server_dies_with_its_owner(address: RedisAddress, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from core.index.redis_server import RedisAddress, RedisServer\n"
        f"address = RedisAddress({address.port}, {address.password!r})\n"
        f"RedisServer(address, log=Path({str(tmp_path / 'log')!r})).start()\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        with connect(address) as client:
            pid = client.info("server")["process_id"]
        owner.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_actor_restarts_the_server_on_the_same_port(ray_head: Any, address: RedisAddress, tmp_path: Path) -> None:
    make = ray.remote(EmbeddedIndex).options(
        num_cpus=0, max_restarts=-1, lifetime="detached", name="index", namespace="r"
    )
    actor = make.remote(address, str(tmp_path))
    try:
        ray.get(actor.ready.remote(), timeout=WITHIN_S)
        with connect(address) as client:
            first = client.info("server")["process_id"]
            os.kill(first, signal.SIGKILL)
            second = client.info("server")["process_id"]
            assert second != first
            ray.kill(actor, no_restart=False)  # kills the owner and its server; Ray restarts the actor
            until(lambda: client.info("server")["process_id"] not in (first, second))
    finally:
        ray.kill(actor)


async def test_failed_start_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_starts = 0

    def start(server: RedisServer) -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts == 1:
            raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(RedisServer, "start", start)
    monkeypatch.setattr(RedisServer, "wait", lambda server: 0)
    keeper = EmbeddedIndex.__new__(EmbeddedIndex)
    await keeper.__init__(RedisAddress(free_port()), str(tmp_path))  # type: ignore[misc,func-returns-value]
    with pytest.raises(OSError, match="Cannot allocate memory"):
        await keeper.ready()
    await becomes(lambda: num_starts > 1)


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
