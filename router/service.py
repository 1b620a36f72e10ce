"""One router, whole: who may ask, the model's text side, the replicas, the dispatch between them; both doors, and the
admin listener.

Knows nothing of Ray: `router.app` runs it inside a Serve replica, tests run it as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.grammar.compiler import GrammarCompiler
from cluster.index.redis_client import connect_redis
from cluster.model import config as model_config
from cluster.model import source as model_source
from cluster.process.supervisor import Supervisor
from cluster.rpc import worker_pb2
from cluster.words.api_key import KeyBook
from cluster.words.credentials import Credentials, Purpose
from cluster.words.network import is_loopback
from cluster.words.papers import Identity
from cluster.words.request import Role
from cluster.words.revisions import RevisionTable
from cluster.words.spec import RouterSpec, Spec
from cluster.words.traffic import ShownDecision, TrafficAnswer, TrafficNews
from router.access.access import Access
from router.admin_door import AdminDoor
from router.batches.batches import Batches
from router.batches.bounds import BatchBounds
from router.doors.certificates import Certificates
from router.doors.connections import HTTP_DOOR
from router.doors.grpc_api import GrpcApi, open_grpc_api
from router.doors.health_api import HealthProbes
from router.doors.http_app import create_app
from router.doors.http_listener import HttpListener
from router.metrics import Metrics
from router.routing.chooser import Chooser
from router.routing.plain_policies import make_policy
from router.serving.core import RouterCore
from router.serving.discovery import Discovery
from router.serving.dispatch import Dispatch
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replicas
from router.serving.revision_watch import RevisionWatch
from router.stored.response_store import StoreBounds
from router.stored.responses import StoredResponses
from router.text.chat_template import ChatTemplate, find_chat_template
from router.text.completion import Completions
from router.text.completion_request import MAX_CHOICES, ModelCard
from router.text.dialect import Dialect
from router.text.tokenizer import Tokenizer
from router.text.trail import RequestTrail
from router.tracing import Tracing
from router.traffic import TrafficRecord
from router.traffic_teller import TrafficTeller

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_MAX_LINES = 64  # of batches, that a router answers at a time; and no more than half of what one replica runs


class RouterService:
    """Open it with `open`, on the event loop that will serve it."""

    def __init__(
        self,
        completions: Completions,
        core: RouterCore,
        discovery: Discovery,
        revisions: RevisionWatch,
        metrics: Metrics,
        access: Access,
        stored: StoredResponses,
        batches: Batches | None,
        *,
        tasks: Supervisor,
        drain_s: float,
    ) -> None:
        self._completions = completions
        self._core = core
        self._dispatch = core.dispatch
        self._replicas = core.dispatch.replicas
        self._discovery = discovery
        self._revisions = revisions
        self._metrics = metrics
        self._access = access
        self._stored = stored
        self._batches = batches
        self._grpc: GrpcApi | None = None
        self._http: HttpListener | None = None
        self._admin: AdminDoor | None = None
        self._drain_s = drain_s
        self._is_closing = False
        self._tasks = tasks

    @classmethod
    async def open(
        cls,
        spec: Spec,
        *,
        credentials: Credentials,
        identity: Identity,
        host: str = "127.0.0.1",
        node: str | None = None,
        trail: Path | None = None,
        keys: KeyBook | None = None,
        revisions: RevisionTable | None = None,
    ) -> RouterService:
        """Load the model's text side, find the replicas, open both doors. Raises SpecError, DeployError.

        identity: by a name that no other one of this deployment has. host: where the doors listen. node: the address of
        this machine among the others; None: that one. trail: the file with one line for each request. keys, revisions:
        what the controller has said of API keys and of the revisions that serve; None: Redis alone says it.
        """
        model_dir = await asyncio.to_thread(model_source.resolve, spec.model.source)
        config = model_config.load(model_dir)
        metrics = Metrics()
        tasks = Supervisor(died=lambda name: metrics.task_deaths.labels(name.partition(" ")[0]).inc())
        replicas = Replicas(lambda member: GrpcWorker(member.replica, member.address, identity=identity), tasks=tasks)
        discovery = Discovery(
            connect_redis(credentials.index_url),
            replicas,
            name=spec.name,
            key=credentials.key(Purpose.MEMBERS),
            tasks=tasks,
            count_refused=lambda why: metrics.members_refused.labels(why).inc(),
        )
        access = await Access.follow(
            credentials.index_url,
            name=spec.name,
            seal_key=credentials.key(Purpose.API_KEYS),
            salt_key=credentials.key(Purpose.SALTS),
            is_required=spec.router.needs_keys(host),
            is_cache_told=is_loopback(host),
            num_routers=spec.router.replicas,
            tasks=tasks,
            count=lambda outcome: metrics.requests.labels(outcome).inc(),
            known=keys,
        )
        policy = make_policy(spec.router.policy, pulls=True)
        dispatch = Dispatch(
            replicas,
            Chooser(policy, max_local_tokens=spec.router.max_local_prefill),
            model=model_config.fingerprint(model_dir),
            block_size=spec.kv.block_size,
            vocab_size=config.vocab_size,
            queue_s=spec.timeouts.queue_s,
            max_waiting=spec.router.max_waiting,
            metrics=metrics,
            tenant_share=lambda: spec.router.tenant_share if access.has_many_tenants else 1.0,
        )
        watch = RevisionWatch(
            connect_redis(credentials.index_url),
            dispatch.revisions,
            name=spec.name,
            key=credentials.key(Purpose.REVISIONS),
            router=identity.name.router,
            known=revisions,
        )
        core = RouterCore(dispatch)
        tokenizer = Tokenizer(model_dir)
        source = find_chat_template(model_dir, spec.model.chat_template)
        template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
        completions = Completions(
            token_service=core,
            tokenizer=tokenizer,
            chat_template=template,
            dialect=Dialect.of(
                template.source, tool_parser=spec.model.tool_parser, reasoning_parser=spec.model.reasoning_parser
            ),
            model=ModelCard(
                id=spec.model.name,
                max_context=min(config.max_context, spec.model.max_context or config.max_context),
                vocab_size=config.vocab_size,
                dtype=spec.model.dtype,
                max_choices=min(MAX_CHOICES, spec.decode.max_running),
            ),
            metrics=metrics,
            max_request_s=spec.timeouts.request_s,
            max_unread_s=spec.timeouts.unread_s,
            trail=RequestTrail(trail),
            traffic=TrafficRecord(credentials.key(Purpose.TRAFFIC), router=identity.name.router),
            grammars=await asyncio.to_thread(GrammarCompiler, model_dir, vocab_size=config.vocab_size),
            tracing=Tracing.of(spec.tracing, deployment=spec.name, router=identity.name.router),
        )
        stored = StoredResponses.in_redis(
            credentials.index_url,
            name=spec.name,
            key=credentials.key(Purpose.RESPONSES),
            bounds=StoreBounds(
                max_bytes=spec.router.stored_responses_mib * 2**20, ttl_s=spec.router.stored_responses_s
            ),
        )
        batches = Batches.in_redis(
            credentials.index_url,
            name=spec.name,
            key=credentials.key(Purpose.BATCHES),
            bounds=BatchBounds(max_bytes=spec.router.batch_mib * 2**20),
            client_of=access.client_of,
            at_a_time=min(_MAX_LINES, max(1, spec.decode.max_running // 2)),
        )
        drain_s = spec.timeouts.drain_s
        service = cls(
            completions, core, discovery, watch, metrics, access, stored, batches, tasks=tasks, drain_s=drain_s
        )
        await service._open_doors(spec, host=host)
        await service._open_admin(spec, credentials, router=identity.name.router, node=node or host)
        discovery.start()
        metrics.watch(service._statuses)
        service._start(core, spec.router)
        logger.info(
            "router open router=%s grpc=%s:%d http=%s:%d admin=%s:%d",
            identity.name.router,
            *(host, service.grpc_port),
            *service.http_address,
            *service.admin_address,
        )
        return service

    @property
    def grpc_port(self) -> int:
        assert self._grpc
        return self._grpc.port

    @property
    def http_address(self) -> tuple[str, int]:
        assert self._http
        return self._http.address

    @property
    def admin_address(self) -> tuple[str, int]:
        """Where operators ask."""
        assert self._admin
        return self._admin.address

    def health(self) -> dict[str, int]:
        """How many replicas of each role can be used now."""
        return {role.value: len(self._replicas.usable(role)) for role in Role}

    @property
    def probes(self) -> HealthProbes:
        return HealthProbes(live=self.is_live, ready=self.is_ready, startup=lambda: self._discovery.has_read)

    def is_live(self) -> bool:
        """No: a task of the router keeps dying, and a new process is wanted."""
        return not self._tasks.failing

    def is_ready(self) -> bool:
        """Whether requests should come here."""
        return not self._is_closing and self._dispatch.may_answer()

    def tell_traffic(self, tell: Callable[[TrafficNews], Awaitable[TrafficAnswer]]) -> None:
        """From now on, every few seconds, what has come and what is over. tell: to whoever collects it, and decides by
        it. Raises ClusterError."""
        record = self._completions.traffic
        assert record
        teller = TrafficTeller(record, self._dispatch, answered=self._show_scaling)
        self._tasks.start("traffic", lambda: teller.tell_forever(tell))

    async def close(self) -> None:
        """Say that no more requests should come, let those under way finish for as long as the spec says, and go."""
        self._is_closing = True
        if self._batches:
            await self._batches.leave()
        doors = [door for door in (self._grpc, self._http) if door]
        await asyncio.gather(*(door.close(grace_s=self._drain_s) for door in doors))
        if self._admin:
            await self._admin.close()
        await self._access.close()
        await self._stored.close()
        if self._batches:
            await self._batches.close()
        await self._discovery.close()
        await self._core.close()
        await self._tasks.close()
        await self._revisions.close()
        await self._replicas.close()
        if tracing := self._completions.tracing:
            await asyncio.to_thread(tracing.close)
        self._completions.close()

    async def _open_doors(self, spec: Spec, *, host: str) -> None:
        """Routers of one machine share both ports."""
        router, is_port_shared = spec.router, spec.router.replicas > 1
        self._grpc = await open_grpc_api(
            self._completions,
            access=self._access,
            host=host,
            port=router.grpc_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
        )
        app = create_app(
            self._completions,
            access=self._access,
            is_healthy=self._dispatch.may_answer,
            probes=self.probes,
            refuses_unknown_fields=router.unknown_fields == "refuse",
            stored=self._stored,
            batches=self._batches,
            max_resume_s=spec.timeouts.resume_s,
            cors_origins=[one.strip() for one in router.cors_origins.split(",") if one.strip()],
        )
        self._http = await HttpListener.open(
            app,
            host=host,
            port=router.http_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
            limits=HTTP_DOOR,
            max_unread_s=spec.timeouts.unread_s,
        )

    async def _open_admin(self, spec: Spec, credentials: Credentials, *, router: str, node: str) -> None:
        self._admin = await AdminDoor.open(
            spec,
            credentials,
            router=router,
            node=node,
            dispatch=self._dispatch,
            metrics=self._metrics,
            health=self.health,
            tasks=self._tasks,
        )

    def _start(self, core: RouterCore, spec: RouterSpec) -> None:
        """What runs for as long as the router does."""
        self._tasks.start("health", self._watch)
        self._tasks.start("revisions", self._revisions.follow_forever)
        if self._batches:
            self._batches.start(self._tasks)
        if spec.rebalance:
            self._tasks.start("rebalance", core.rebalance_forever)
        if spec.backup_tokens:
            self._tasks.start("backup", lambda: core.back_up_forever(every=spec.backup_tokens))

    def _show_scaling(self, decisions: Sequence[ShownDecision]) -> None:
        if self._admin:
            self._admin.show_scaling([asdict(decision) for decision in decisions])

    def _statuses(self) -> Iterator[tuple[Role, worker_pb2.Status]]:
        return ((replica.member.role, replica.status) for replica in self._replicas if replica.is_alive)

    async def _watch(self) -> None:
        """Keep the gRPC health service in step with the replicas."""
        while True:
            assert self._grpc
            self._grpc.set_health(is_live=self.is_live(), is_ready=self.is_ready())
            try:
                await self._replicas.changed(timeout_s=_WATCH_S)
            except TimeoutError:
                pass
