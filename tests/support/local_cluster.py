"""A complete disaggregated deployment without Ray: real workers, real links, real Redis, real dispatch.

Ranks run in this process or, with `local_cluster(..., processes=True)`, in one process each.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

import decode_worker.actor
import prefill_worker.actor
from cluster.control.replica import role_of
from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.identity.process_name import ProcessName
from core.index.redis_client import connect_redis
from core.model import config as model_config
from core.rpc.worker_pb2 import Totals
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.launch import Launch
from core.types.prompt_logprobs import PromptLogprobs
from core.types.request import Role, SampledToken, Sampling, SequenceRequest
from core.types.role_switch import other
from router.generation import RequestRoute
from router.routing.candidates import Policy
from router.routing.chooser import Chooser
from router.routing.policies import make_policy
from router.serving.core import RouterCore
from router.serving.discovery import Discovery
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replica, Replicas
from router.telemetry.metrics import Metrics
from tests.support.hosts import Host
from tests.support.identities import in_clear, proven, tls_credentials
from tests.support.long_answers import Ceiling
from tests.support.rank_in_process import RANKS_LOG, Fault, RankInProcess, audit
from tests.support.waiting import WITHIN_S, becomes, beside

_MAKERS = {Role.PREFILL: prefill_worker.actor.make_rank, Role.DECODE: decode_worker.actor.make_rank}
SETTLE_S = 30.0  # shorter than the expiry of a handoff, so free blocks were returned and did not expire
REFRESH_S = 0.02  # routers read the membership less often by default, which delays each start of a replica


@dataclass
class LocalReplica:
    id: str
    ranks: list[Any]  # RankProcess or RankInProcess

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank; for ranks in their own processes."""
        for rank in self.ranks:
            rank.send(number)

    @property
    def has_been_hit(self) -> bool:
        """Return whether a rank is dead or stopped."""
        return any(rank.state in ("Z", "X", "T") for rank in self.ranks)

    @property
    def is_alive(self) -> bool:
        return all(not isinstance(rank, RankInProcess) or rank.process.is_alive() for rank in self.ranks)

    @property
    def blocks(self) -> dict[str, int]:
        return dict(self.ranks[0].status()["blocks"])

    def audit(self, *, clear: bool) -> None:
        """Check the blocks of the idle replica; see rank_in_process.audit."""
        for rank in self.ranks:
            rank.audit(clear=clear) if isinstance(rank, RankInProcess) else audit(rank, clear=clear)


@dataclass
class Answer:
    """Result of one request: tokens per choice, and its route."""

    tokens: dict[int, list[SampledToken]]
    route: RequestRoute
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens[0]]


@dataclass
class LocalCluster:
    """Ranks of a deployment, and its router while `routed` runs."""

    launch: Launch
    authority: Authority
    router: Identity
    model: str
    processes: bool = False
    host: str = "127.0.0.1"  # of ranks that run on no other Host
    settle_s: float = SETTLE_S  # limit for replicas to become idle
    pools: dict[Role, list[LocalReplica]] = field(default_factory=lambda: {role: [] for role in Role})
    replicas: Replicas = field(init=False)
    core: RouterCore = field(init=False)
    _before: dict[str, Totals] = field(default_factory=dict)
    _next_id: int = 0
    _identities: list[Identity] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._identities.append(self.router)

    @property
    def spec(self) -> Spec:
        return self.launch.spec

    @property
    def credentials(self) -> DeploymentSecrets:
        return self.launch.credentials

    @property
    def every_replica(self) -> list[LocalReplica]:
        return [replica for pool in self.pools.values() for replica in pool]

    @asynccontextmanager
    async def routed(self, policy: Policy | None = None, *, clear: bool = False) -> AsyncIterator[None]:
        """Run a router with the settings of `spec`, and assert at the end that nothing is left behind.

        policy: overrides the spec's. clear: see `check_whole`.
        """
        spec, model_dir = self.spec, Path(self.spec.model.source)
        self.replicas = Replicas(lambda member: GrpcWorker(member, identity=self.router))
        redis = connect_redis(self.credentials.index_url)
        discovery = Discovery(redis, self.replicas, name=spec.name, key=self.credentials.key(Purpose.MEMBERS))
        policy = policy or make_policy(spec.router.policy, prefix_fetches=True)
        self.core = RouterCore(
            self.replicas,
            Chooser(policy, max_local_tokens=spec.router.max_local_prefill),
            model=self.model,
            block_size=spec.kv.block_size,
            vocab_size=model_config.load(model_dir).vocab_size,
            queue_s=spec.timeouts.queue_s,
            max_waiting=spec.router.max_waiting,
            metrics=Metrics(),
        )
        discovery.start(refresh_s=REFRESH_S)
        try:
            yield
            await self.check_whole(clear=clear)
        finally:
            await discovery.close()
            await self.replicas.close()

    async def start(self) -> None:
        """Start the replicas that the spec asks for."""
        starting = [self.add(role) for role in Role for _ in range(self.spec.pool(role).replicas)]
        if self.processes:
            await asyncio.gather(*starting)
        else:  # sequentially, because they share an interpreter
            for start in starting:
                await start

    async def until_known(self) -> None:
        """Wait until the router knows all replicas of a running cluster, and count their totals from then on."""
        await self.until(lambda: all(self._is_usable(replica) for replica in self.every_replica))
        self._before = {replica.id: copy(replica.status.totals) for replica in self.replicas}

    def stop(self) -> None:
        for replica in self.every_replica:
            for rank in replica.ranks:
                rank.stop()

    async def add(
        self,
        role: Role,
        *faults: Fault,
        ceiling: Ceiling | None = None,
        prepare: Callable[[], None] | None = None,
        log: str = RANKS_LOG,
        on: Host | None = None,
        kv_memory_gib: float | None = None,
    ) -> LocalReplica:
        """Start one more replica and wait until the router sees it.

        kv_memory_gib: its KV pool; None: as in the spec.
        Faults, ceiling, prepare, log and a remote host are for ranks in their own processes.
        """
        replica = LocalReplica(f"{role}-{self._next_id}", [])
        self._next_id += 1
        pool, launch = self.spec.pool(role), self.launch
        if kv_memory_gib is not None:
            pool = pool.model_copy(update={"kv_memory_gib": kv_memory_gib})
            launch = replace(launch, spec=self.spec.model_copy(update={role.value: pool}))
        for rank in range(pool.tensor_parallel):
            identity = self.identity(ProcessName.of_rank(self.spec.name, replica.id, rank))
            place: dict[str, Any] = {"host": on.address, "network": on.network} if on else {"host": self.host}
            made: Any
            if self.processes:
                how: dict[str, Any] = {"faults": faults, "ceiling": ceiling, "prepare": prepare, "log": log}
                made = RankInProcess(role, launch, identity=identity, **how, **place)
            else:
                made = _MAKERS[role](launch, identity=identity, **place)
            replica.ranks.append(made)
        self.pools[role].append(replica)
        bindings = await asyncio.gather(*(asyncio.to_thread(rank.bind) for rank in replica.ranks))
        addresses = [binding["address"] for binding in bindings]
        await asyncio.gather(*(asyncio.to_thread(rank.load, addresses) for rank in replica.ranks))
        await self.until(lambda: self._is_usable(replica))
        return replica

    def identity(self, name: ProcessName) -> Identity:
        """Return the identity of another process that belongs to this cluster."""
        self._identities.append(_identity(self.spec, self.authority, name))
        return self._identities[-1]

    def renew(self) -> None:
        """Renew all certificates; for ranks in this process."""
        for identity in self._identities:
            identity.renew(tls_credentials(self.authority, identity.name))

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, id: str = "r", n: int = 1, **fields: Any
    ) -> Answer:
        """Answer one request. fields: further fields of SequenceRequest."""
        request = SequenceRequest(
            id=id,
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            choices=tuple(range(n)),
            **fields,
        )
        tokens: dict[int, list[SampledToken]] = {choice: [] for choice in range(n)}
        async with self.core.start(request) as generation:
            async for arrived in generation:
                for choice, some in arrived.items():
                    tokens[choice] += some
        return Answer(tokens, generation.route, generation.prompt_logprobs)

    async def generate_all(
        self, prompts: Sequence[Sequence[int]], samplings: Sampling | Sequence[Sampling], **options: Any
    ) -> list[Answer]:
        """Generate concurrently, within WITHIN_S. samplings: one for all, or one of each prompt."""
        every = [samplings] * len(prompts) if isinstance(samplings, Sampling) else samplings
        requests = [
            self.generate(prompt, sampling, id=str(number), **options)
            for number, (prompt, sampling) in enumerate(zip(prompts, every, strict=True))
        ]
        async with asyncio.timeout(WITHIN_S):
            return await asyncio.gather(*requests)

    async def idle(self, *, timeout_s: float | None = None) -> None:
        """Wait until every live replica is idle and has all its blocks back. timeout_s: None for `settle_s`."""
        await becomes(
            lambda: all(_is_idle(one) for one in self.every_replica if one.is_alive),
            within_s=timeout_s or self.settle_s,
        )

    async def check_whole(self, *, clear: bool = False) -> None:
        """Assert that every request has ended, and that each live replica has all its blocks in consistent tables.

        clear: forget what the replicas have cached.
        """
        await becomes(lambda: not self.core.num_running + self.core.admission.num_waiting, within_s=self.settle_s)
        for replica in self.every_replica:
            if replica.is_alive:
                await self._audit(replica, clear=clear)

    async def _audit(self, replica: LocalReplica, *, clear: bool) -> None:
        """Audit a replica. A call that was on its way when its request was cancelled may still arrive after `idle`."""
        end_at = time.monotonic() + self.settle_s
        while True:
            await self.idle()
            try:
                return await asyncio.to_thread(replica.audit, clear=clear)
            except AssertionError:
                if time.monotonic() > end_at:
                    raise

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition that changes with the replicas' reports. Raises TimeoutError."""
        while not condition():
            await self.replicas.changed(timeout_s=WITHIN_S)

    async def drain(self, replica: LocalReplica) -> None:
        """Drain a replica and wait until it is drained."""
        for rank in replica.ranks:
            rank.drain()
        await becomes(lambda: replica.ranks[0].status()["state"] == "drained")

    async def switch(self, replica: LocalReplica) -> LocalReplica:
        """Switch a replica to the other role and wait until the router sees it."""
        role = other(role_of(replica.id))
        successor = LocalReplica(f"{role}-{self._next_id}", [])
        self._next_id += 1
        await self.drain(replica)
        names = [ProcessName.of_rank(self.spec.name, successor.id, rank) for rank in range(len(replica.ranks))]
        becoming = [
            asyncio.to_thread(self._become, rank, role, self.identity(name))
            for rank, name in zip(replica.ranks, names, strict=True)
        ]
        successor.ranks += await asyncio.gather(*becoming)
        self.pools[role_of(replica.id)].remove(replica)
        self.pools[role].append(successor)
        addresses = [rank.bind()["address"] for rank in successor.ranks]
        await asyncio.gather(*(asyncio.to_thread(rank.load, addresses) for rank in successor.ranks))
        await self.until(lambda: self._is_usable(successor))
        return successor

    def _become(self, rank: Any, role: Role, identity: Identity) -> Any:
        """Return the rank that takes over from `rank`; a rank in its own process keeps its object here."""
        if self.processes:
            rank.become(role, identity)
            return rank
        successor: Any = _MAKERS[role](self.launch, identity=identity, host=self.host)
        successor.bind()
        successor.succeed(rank)
        return successor

    def totals(self, role: Role, number: int = 0) -> Totals:
        """Return the scalar totals of one replica of a pool since the test began."""
        replica = self.pools[role][number]
        now, before = self.seen(replica).status.totals, self._before.get(replica.id, Totals())
        names = [field.name for field in Totals.DESCRIPTOR.fields if field.message_type is None]
        return Totals(**{name: getattr(now, name) - getattr(before, name) for name in names})

    def _is_usable(self, replica: LocalReplica) -> bool:
        seen = self.replicas.get(replica.id)
        return seen is not None and seen.is_usable

    def seen(self, replica: LocalReplica) -> Replica:
        """Return the router's view of the replica."""
        found = self.replicas.get(replica.id)
        assert found
        return found


async def moved(cluster: LocalCluster, answering: Coroutine[Any, Any, Answer], under: Ceiling) -> Answer:
    """Migrate the answer stopped at the ceiling from the first decode replica to a new one, and let it end there."""
    task = asyncio.create_task(answering)
    source = cluster.pools[Role.DECODE][0]
    await cluster.until(lambda: cluster.seen(source).status.running)
    target = await cluster.add(Role.DECODE)
    async with beside(cluster.drain(source)):
        await cluster.until(lambda: cluster.seen(target).status.context_tokens)  # decoding on the target
        under.lift()
        answer = await task
    assert answer.route.decode_replica == target.id and answer.route.attempts == 1
    return answer


def _identity(spec: Spec, authority: Authority, name: ProcessName) -> Identity:
    return in_clear(name) if spec.security.tls == "off" else proven(authority, name)


def _is_idle(replica: LocalReplica) -> bool:
    try:
        status = replica.ranks[0].status()
    except (OSError, EOFError):  # killed a moment ago; `idle` checks again
        return False
    blocks = status["blocks"]
    return not status["running"] + status["waiting"] and blocks["free"] + blocks["cached"] == blocks["total"]


@asynccontextmanager
async def local_cluster(
    model_dir: Path,
    redis_url: str,
    *,
    processes: bool = False,
    host: str = "127.0.0.1",
    policy: Policy | None = None,
    is_alone: bool = True,
    **tree: Any,
) -> AsyncIterator[LocalCluster]:
    """Deploy the spec `tree` with the model in `model_dir`, for one test. policy: overrides the spec's.

    is_alone: empty the database in Redis. Tests that change nothing of their cluster use tests.support.shared_clusters.
    """
    cluster = make_cluster(parse_tree(model_dir, tree), redis_url, processes=processes, host=host, is_alone=is_alone)
    try:
        async with cluster.routed(policy):
            await cluster.start()
            yield cluster
    finally:
        await asyncio.to_thread(cluster.stop)


def parse_tree(model_dir: Path, tree: dict[str, Any]) -> Spec:
    """Return the spec of a deployment of this model; a pool without a size has 0.1 GiB."""
    tree.setdefault("model", {}).update(source=str(model_dir))
    return parse_spec(tree | {role.value: {"kv_memory_gib": 0.1} | tree.get(role.value, {}) for role in Role})


def make_cluster(spec: Spec, redis_url: str, *, is_alone: bool = True, **options: Any) -> LocalCluster:
    """Return a cluster without replicas. is_alone: empty its database in Redis. options: fields of LocalCluster."""
    if is_alone:
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()
    authority = Authority.from_files(spec.security) if spec.security.tls == "files" else Authority.create(spec.name)
    return LocalCluster(
        launch=Launch(spec=spec, log_dir="unused", credentials=DeploymentSecrets.new(index_url=redis_url)),
        authority=authority,
        router=_identity(spec, authority, ProcessName.of_router(spec.name, "router-0")),
        model=model_config.fingerprint(Path(spec.model.source)),
        **options,
    )
