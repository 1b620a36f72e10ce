"""A whole disaggregated deployment in one process, without Ray: real workers, real links, real Redis, real dispatch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis

import decode_worker.actor
import prefill_worker.actor
from cluster import model_config
from cluster.metrics import Metrics
from cluster.rank_process import RankProcess
from cluster.request import Role, SampledToken, Sampling, SequenceRequest
from cluster.spec import Spec, parse_spec
from router.dispatch import Dispatch
from router.generation import Route
from router.plain_policies import make_policy
from router.replicas import Replicas

_MAKERS = {Role.PREFILL: prefill_worker.actor.make_rank, Role.DECODE: decode_worker.actor.make_rank}
_START_S = 60


@dataclass
class LocalReplica:
    id: str
    ranks: list[RankProcess]

    @property
    def blocks(self) -> dict[str, int]:
        return dict(self.ranks[0].status()["blocks"])


@dataclass
class Answer:
    """What came of one request: tokens per choice, and the way it went."""

    tokens: dict[int, list[SampledToken]]
    route: Route

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens[0]]


@dataclass
class LocalCluster:
    spec: Spec
    index_url: str
    model: str
    replicas: Replicas
    dispatch: Dispatch
    pools: dict[Role, list[LocalReplica]] = field(default_factory=lambda: {role: [] for role in Role})
    _next_id: int = 0

    async def add(self, role: Role) -> LocalReplica:
        """Start one more replica and wait until the router sees it."""
        replica = LocalReplica(f"{role}-{self._next_id}", [])
        self._next_id += 1
        for rank in range(self.spec.pool(role).tensor_parallel):
            arguments = {"replica": replica.id, "rank": rank, "index_url": self.index_url, "log_dir": "unused"}
            replica.ranks.append(_MAKERS[role](self.spec.model_dump(), **arguments))
        addresses = [rank.bind()["address"] for rank in replica.ranks]
        await asyncio.gather(*(asyncio.to_thread(rank.load, addresses) for rank in replica.ranks))
        self.pools[role].append(replica)
        while not (seen := self.replicas.get(replica.id)) or not seen.is_usable:
            await self.replicas.changed(timeout_s=_START_S)
        return replica

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, id: str = "r", n: int = 1, salt: str = ""
    ) -> Answer:
        request = SequenceRequest(
            id=id,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            choices=tuple(range(n)),
            salt=salt,
        )
        tokens: dict[int, list[SampledToken]] = {choice: [] for choice in range(n)}
        async with self.dispatch.start(request) as generation:
            async for item in generation:
                tokens[item.choice].append(item.token)
        return Answer(tokens, generation.route)

    async def idle(self, *, timeout_s: float = 2.0) -> None:
        """Wait until every replica has nothing to do and has all its blocks back. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not all(_is_idle(replica) for pool in self.pools.values() for replica in pool):
                await asyncio.sleep(0.01)


def _is_idle(replica: LocalReplica) -> bool:
    status = replica.ranks[0].status()
    blocks = status["blocks"]
    return not status["running"] + status["waiting"] and blocks["free"] + blocks["cached"] == blocks["total"]


@asynccontextmanager
async def local_cluster(model_dir: Path, redis_url: str, **tree: Any) -> AsyncIterator[LocalCluster]:
    """Deploy what `tree` says, as in a spec's YAML, with the model in `model_dir`."""
    tree.setdefault("model", {}).update(source=str(model_dir))
    spec = parse_spec(tree)
    redis.Redis.from_url(redis_url).flushall()
    fingerprint = model_config.fingerprint(model_dir)
    replicas = Replicas(Redis.from_url(redis_url), name=spec.name, router="router-0")
    dispatch = Dispatch(
        replicas,
        router="router-0",
        model=fingerprint,
        policy=make_policy(spec.router.policy),
        max_local_tokens=spec.router.max_local_prefill,
        queue_s=spec.timeouts.queue_s,
        metrics=Metrics(),
    )
    cluster = LocalCluster(spec, redis_url, fingerprint, replicas, dispatch)
    replicas.start()
    try:
        for role in Role:
            for _ in range(spec.pool(role).replicas):
                await cluster.add(role)
        yield cluster
    finally:
        await replicas.close()
        for pool in cluster.pools.values():
            for replica in pool:
                for rank in replica.ranks:
                    await asyncio.to_thread(rank.stop)
