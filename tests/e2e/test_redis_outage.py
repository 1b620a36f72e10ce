"""Redis outages: requests are served, membership is kept, and the index is rebuilt after an empty restart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from core.identity.deployment_secrets import Purpose
from core.index import membership, presence
from core.index.redis_client import connect_redis
from core.index.redis_server import RedisAddress, RedisServer
from core.process.ports import free_port
from core.types.prefix_hash import block_hashes, root_hash
from core.types.request import Role, Sampling
from router.serving.discovery import Discovery
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replicas
from tests.e2e.conftest import Lab, exact_tree
from tests.engine.steps import prompts
from tests.support.grids import quick
from tests.support.local_cluster import REFRESH_S, LocalCluster, local_cluster
from tests.support.redis_at import Relay, redis_at
from tests.support.waiting import becomes, stays

_GREEDY = Sampling(max_tokens=16, temperature=0.0)
_PROMPT = prompts(70)[0]
# The policy shows in the route what the router knows.
_TREE = exact_tree(1, 2, max_local_prefill=16, policy="prefix")


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the leases of replicas in this process."""
    monkeypatch.setattr(membership, "LEASE_S", 1.0)
    monkeypatch.setattr(presence, "RENEW_S", 0.3)


class _Redis:
    """Redis server of the test, with a fixed port across restarts."""

    def __init__(self, log: Path) -> None:
        self._address = RedisAddress(free_port())
        self._server = RedisServer(self._address, log=log)
        self.url = self._address.url
        self.start()

    def start(self) -> None:
        self._server.start()
        with redis.Redis.from_url(self.url) as client:
            self._pid = client.info("server")["process_id"]

    def kill(self) -> None:
        self._server.stop()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[_Redis]:
    server = _Redis(tmp_path / "redis.log")
    yield server
    server.kill()


@asynccontextmanager
async def _second_router(
    cluster: LocalCluster, *, index_url: str = "", has_controller: bool = False
) -> AsyncIterator[Replicas]:
    """Yield the replicas as another router finds them. index_url: of another Redis. has_controller: ask the replicas
    for their records, as the controller does."""

    async def find_members() -> list[bytes]:
        return [replica.ranks[0].status()["member"] for replica in cluster.every_replica]

    replicas = Replicas(lambda member: GrpcWorker(member, identity=cluster.router))
    discovery = Discovery(
        connect_redis(index_url or cluster.credentials.index_url),
        replicas,
        name=cluster.spec.name,
        key=cluster.credentials.key(Purpose.MEMBERS),
        find_members=find_members if has_controller else None,
    )
    discovery.start(refresh_s=REFRESH_S)
    try:
        yield replicas
    finally:
        await discovery.close()
        await replicas.close()


def _prefix_sources(cluster: LocalCluster) -> dict[str, int]:
    hashes = block_hashes(root_hash(cluster.model), tuple(_PROMPT), block_size=16)
    return cluster.replicas.index.match(hashes)


async def _know_the_prompt(cluster: LocalCluster) -> dict[str, int]:
    await cluster.generate(_PROMPT, _GREEDY)
    await becomes(
        lambda: len(_prefix_sources(cluster)) == 2
    )  # the prefill replica, and the decode replica it was shipped to
    return _prefix_sources(cluster)


async def test_redis_restarts_empty(lab: Lab, own_redis: _Redis) -> None:
    async with local_cluster(lab.checkpoint("llama"), own_redis.url, **_TREE) as cluster:
        before = {replica.id: replica for replica in cluster.replicas}
        prefix_sources = await _know_the_prompt(cluster)
        own_redis.kill()
        for number in range(4):
            answer = await cluster.generate(_PROMPT, _GREEDY, id=str(number))
            assert answer.route.attempts == 1
            assert answer.route.decode_replica in prefix_sources, "it still knows where the prefix is"
        assert _prefix_sources(cluster) == prefix_sources
        own_redis.start()
        with redis.Redis.from_url(own_redis.url) as client:
            await becomes(lambda: len(client.smembers("cluster:members")) == 3)
            await becomes(lambda: all(client.scard(f"cluster:blocks:{replica}:device") for replica in prefix_sources))
        await stays(
            lambda: _prefix_sources(cluster) == prefix_sources, for_s=0.5
        )  # the router reads what the replicas write again
        assert {replica.id: replica for replica in cluster.replicas} == before, "the membership must not change"
        newcomer = await cluster.add(Role.DECODE)
        assert newcomer.id in {replica.id for replica in cluster.replicas}


async def test_redis_freezes(lab: Lab, own_redis: _Redis) -> None:
    async with local_cluster(lab.checkpoint("llama"), own_redis.url, **_TREE) as cluster:
        before = {replica.id: replica for replica in cluster.replicas}
        prefix_sources = await _know_the_prompt(cluster)
        own_redis.send(signal.SIGSTOP)
        try:
            end_at = time.monotonic() + 2.5  # beyond all Redis timeouts and leases
            while time.monotonic() < end_at:
                answer = await cluster.generate(_PROMPT, _GREEDY)
                assert answer.route.attempts == 1 and answer.route.decode_replica in prefix_sources
        finally:
            own_redis.send(signal.SIGCONT)
        await cluster.add(Role.DECODE)
        assert {id: replica for id, replica in before.items() if cluster.replicas.get(id) is replica} == before


async def test_it_fails_over(lab: Lab, tmp_path: Path) -> None:
    """The primary becomes a replica without closing connections, and its name leads to the promoted one."""
    with redis_at("127.0.0.1", tmp_path) as old, redis_at("127.0.0.1", tmp_path) as new:
        ports = [urlsplit(url).port or 0 for url in (old, new)]
        async with Relay.to(ports[0]) as (relay, url):
            async with local_cluster(lab.checkpoint("llama"), url, is_alone=False, **_TREE) as cluster:
                prefix_sources = await _know_the_prompt(cluster)
                before = {replica.id: replica for replica in cluster.replicas}
                with redis.Redis.from_url(old) as client:
                    client.replicaof("127.0.0.1", str(ports[1]))
                relay.port = ports[1]
                answer = await cluster.generate(_PROMPT, _GREEDY)
                assert answer.route.attempts == 1 and answer.route.decode_replica in prefix_sources
                newcomer = await cluster.add(Role.DECODE)
                async with _second_router(cluster) as another:
                    await becomes(lambda: {one.id for one in another if one.is_usable} == {*before, newcomer.id})
                assert {one.id: one for one in cluster.replicas if one.id in before} == before


async def test_a_replica_that_dies_meanwhile_is_forgotten_when_it_is_back(lab: Lab, own_redis: _Redis) -> None:
    async with local_cluster(lab.checkpoint("llama"), own_redis.url, processes=True, **_TREE) as cluster:
        doomed = cluster.pools[Role.DECODE][0]
        own_redis.kill()
        doomed.send(signal.SIGKILL)
        answers = await asyncio.gather(*(cluster.generate(_PROMPT, _GREEDY, id=str(i)) for i in range(4)))
        assert {answer.route.decode_replica for answer in answers} == {cluster.pools[Role.DECODE][1].id}
        own_redis.start()
        await becomes(lambda: cluster.replicas.get(doomed.id) is None)


@pytest.mark.parametrize("fault", quick(["full", "wrong types", "slow", "away"], ["away", "wrong types"]))
async def test_a_router_that_starts_while_redis_refuses_asks_the_controller(
    lab: Lab, tmp_path: Path, fault: str
) -> None:
    with redis_at("127.0.0.1", tmp_path) as url:
        port = urlsplit(url).port or 0
        async with (
            Relay.to(port) as (relay, index_url),
            local_cluster(lab.checkpoint("llama"), url, **_TREE) as cluster,
        ):
            with redis.Redis.from_url(url) as client:
                match fault:
                    case "full":
                        client.config_set("maxmemory", "1")
                        client.flushall()  # the leases run out
                    case "wrong types":
                        client.config_set("maxmemory", "1")
                        client.flushall()
                        client.config_set("maxmemory", "0")
                        client.set("cluster:members", "foreign")
                    case "slow":
                        relay.delay_s = 2.5
                    case "away":
                        relay.port = 1
            async with _second_router(cluster, index_url=index_url, has_controller=True) as another:
                await becomes(lambda: sum(one.is_usable for one in another) == 3)
                assert another.may_answer()
                if fault == "full":
                    await stays(lambda: sum(one.is_usable for one in another) == 3, for_s=1)
