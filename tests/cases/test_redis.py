"""Failover of Redis to a promoted replica, without closed connections: one lease, then a real deployment on Ray."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import redis

from core.index import presence as presence_module
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.process import processes
from core.process.ports import free_port
from core.types.tier import Tier
from tests.cluster.cli.command import ClusterCommand
from tests.e2e.conftest import Checkpoint
from tests.support.members import make_member
from tests.support.plain_http import http_client
from tests.support.redis_at import Relay, redis_at
from tests.support.waiting import becomes, told

_STREAMS = 16
_EXACT = ["model.dtype=float32", "kv.wire_dtype=raw", "router.max_local_prefill=0", "model.served_name=tiny"]
_SMALL = ["prefill.kv_memory_gib=0.05", "decode.kv_memory_gib=0.05"]


class _Clients:
    """Clients that stream answers without pause, each one prompt. A refused connection is tried again.

    They read whole bodies: the event loop that they share with the relay to Redis must not fall behind.
    """

    def __init__(self, http: str) -> None:
        self._http = http
        self.num_answers = [0] * _STREAMS
        self.texts: list[set[str]] = [set() for _ in range(_STREAMS)]
        self.broken: list[tuple[float, str]] = []  # start of the stream, and its error

    async def run(self, number: int) -> None:
        prompt = [5 + (number + i) % 20 for i in range(40)]
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 64, "stream": True}
        async with http_client(timeout=60) as client:
            while True:
                started_at = time.monotonic()
                try:
                    answer = await client.post(f"{self._http}/v1/completions", json=body | {"ignore_eos": True})
                    *events, end = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
                    assert answer.status_code == 200 and end == "[DONE]", answer.text
                    choices = [choice for event in events for choice in json.loads(event)["choices"]]
                    self.texts[number].add("".join(choice["text"] for choice in choices))
                    self.num_answers[number] += 1
                except httpx.ConnectError:
                    await told(partial(_is_healthy, self._http))
                except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
                    self.broken.append((started_at, repr(error)))
                    # The socket of a router that dies accepts connections until its process is gone.
                    await told(partial(_is_healthy, self._http))

    async def each_answered(self, num_more: int) -> None:
        """Wait until each client has so many more answers."""
        before = list(self.num_answers)
        await becomes(
            lambda: all(now >= then + num_more for now, then in zip(self.num_answers, before, strict=True)),
            within_s=120,
        )


async def _is_healthy(http: str) -> bool:
    try:
        async with http_client() as client:
            return (await client.get(f"{http}/health", timeout=2)).status_code == 200
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def _streaming(http: str) -> AsyncIterator[_Clients]:
    clients = _Clients(http)
    tasks = [asyncio.create_task(clients.run(number)) for number in range(_STREAMS)]
    try:
        yield clients
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_lease_follows_the_failover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """redis/redis-rs#2115"""
    monkeypatch.setattr(presence_module, "RENEW_S", 0.1)
    member = make_member()

    async def snapshot() -> Mapping[bytes, Tier]:
        return {}

    with redis_at("127.0.0.1", tmp_path) as old, redis_at("127.0.0.1", tmp_path) as new:
        ports = [urlsplit(url).port or 0 for url in (old, new)]
        async with Relay.to(ports[0]) as (relay, url):
            presence = Presence(connect_redis(url), name="c", key=bytes(32), member=member, snapshot=snapshot)
            task = asyncio.create_task(presence.run())
            with redis.Redis.from_url(old) as before, redis.Redis.from_url(new) as after:
                await becomes(lambda: bool(before.exists(f"c:member:{member.replica}")))
                before.replicaof("127.0.0.1", str(ports[1]))
                relay.port = ports[1]
                await becomes(lambda: bool(after.exists(f"c:member:{member.replica}")))
            await presence.leave()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_failover_of_redis_fails_no_stream_and_a_router_killed_then_serves_again(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """redis/redis-rs#2115, under sixteen streams"""
    cluster, http_port = ClusterCommand(tmp_path), free_port()
    http = f"http://127.0.0.1:{http_port}"

    async def run(*arguments: str) -> None:
        outcome = await asyncio.to_thread(cluster.run, *arguments, within_s=300)
        assert outcome.code == 0, outcome.err

    with redis_at("127.0.0.1", tmp_path) as old, redis_at("127.0.0.1", tmp_path) as new:
        ports = [urlsplit(url).port or 0 for url in (old, new)]
        async with Relay.to(ports[0]) as (relay, url):
            spec = [word for key in (*_EXACT, *_SMALL, f"index={url}") for word in ("--set", key)]
            endpoints = ["--grpc-port", str(free_port()), "--http-port", str(http_port)]
            model = ["--model", str(checkpoint("llama", max_position_embeddings=256))]
            await run("deploy", "1P1D", *model, *endpoints, *spec)
            try:
                async with _streaming(http) as clients:
                    await clients.each_answered(1)
                    with redis.Redis.from_url(old) as client:
                        client.replicaof("127.0.0.1", str(ports[1]))
                    relay.port = ports[1]
                    with redis.Redis.from_url(new) as client:
                        await becomes(lambda: len(client.keys("*:member:*")) == 2)
                    await clients.each_answered(3)
                    assert not clients.broken
                    mark = f"CLUSTER_STATE_DIR={cluster.state_root}"
                    (router,) = [
                        pid for pid in processes.marked(mark) if processes.title(pid).startswith("ray::ServeReplica")
                    ]
                    process = psutil.Process(router)
                    process.kill()
                    await asyncio.to_thread(process.wait, 10)
                    killed_at = time.monotonic()
                    await told(partial(_is_healthy, http))
                    print(f"/health answered 200 {time.monotonic() - killed_at:.1f} s after the router's death")
                    await clients.each_answered(3)
                    assert all(started_at < killed_at for started_at, _ in clients.broken), clients.broken
                    assert len(clients.broken) <= _STREAMS
                    assert [len(texts) for texts in clients.texts] == [1] * _STREAMS, "every answer is whole"
                    print(f"{sum(clients.num_answers)} answers, {len(clients.broken)} ended with their router")
                    await run("scale", "decode=2")
                await run("status")
            finally:
                await run("down")
