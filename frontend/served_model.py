"""One model served by a router: its tokenizer and templates, its deployment's replicas, the router core, and its admin
endpoint. A failure here affects this model alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.grammar.compiler import GrammarCompiler
from core.identity.credentials import Identity
from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.index.redis_client import connect_redis
from core.model import config as model_config
from core.model import source as model_source
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.trace.traffic import ShownDecision, TrafficAnswer, TrafficReport
from core.types.request import Role
from core.types.revisions import RevisionTable
from frontend.admin.admin_server import AdminServer
from frontend.chat.chat_template import ChatTemplate, find_chat_template
from frontend.text.completion import Completions
from frontend.text.completion_request import MAX_CHOICES, ModelCard
from frontend.text.sampling_defaults import generation_config_dir, sampling_defaults
from frontend.text.tokenizer import Tokenizer
from frontend.text.usage import RequestAuditLog
from router.routing.chooser import Chooser
from router.routing.policies import make_policy
from router.serving.core import RouterCore
from router.serving.discovery import Discovery, FindMembers, RevisionWatch
from router.serving.grpc_worker import GrpcWorker
from router.serving.replicas import Replicas
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing
from router.telemetry.traffic import TrafficRecord, TrafficReporter

logger = logging.getLogger(__name__)

_WATCH_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RouterMembership:
    """Router's part in one deployment: its identity there, and what its controller provides."""

    identity: Identity  # its router name is unique within the deployment
    audit_log: Path | None = None  # file with one line per request
    revisions: RevisionTable | None = None  # serving revisions; None: read from Redis alone
    find_members: FindMembers | None = None  # see Discovery
    tell: Callable[[TrafficReport], Awaitable[TrafficAnswer]] | None = None  # deliver a traffic report
    # Release the identity. May block.
    leave: Callable[[], None] = lambda: None


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """Model with its deployment. Create with `open`, on the event loop that serves it."""

    completions: Completions
    core: RouterCore
    discovery: Discovery
    revisions: RevisionWatch
    metrics: Metrics
    tasks: Supervisor
    admin: AdminServer | None = None

    @classmethod
    async def open(
        cls,
        spec: Spec,
        *,
        credentials: DeploymentSecrets,
        membership: RouterMembership,
        metrics: Metrics,
        tasks: Supervisor,
        node: str,
        has_many_tenants: Callable[[], bool],
        tracing: Tracing | None,
    ) -> ServedModel:
        """Load the tokenizer and templates, and discover the replicas. Raises SpecError, DeployError.

        tasks: supervisor of the background tasks, closed with the model. node: address of this machine for other
        machines. has_many_tenants: whether more than one tenant sends requests at present.
        """
        identity = membership.identity
        model_dir = await asyncio.to_thread(model_source.resolve, spec.model.source)
        config = model_config.load(model_dir, max_context=spec.model.max_context)
        generation_dir = generation_config_dir(model_dir, spec.model.generation_config)
        tokenizer = await asyncio.to_thread(Tokenizer, model_dir, generation_dir=generation_dir)
        grammars = await asyncio.to_thread(GrammarCompiler, model_dir, vocab_size=config.vocab_size)
        replicas = Replicas(lambda member: GrpcWorker(member, identity=identity), tasks=tasks, model=spec.model.name)
        discovery = Discovery(
            connect_redis(credentials.index_url),
            replicas,
            name=spec.name,
            key=credentials.key(Purpose.MEMBERS),
            find_members=membership.find_members,
            tasks=tasks,
            count_rejected=lambda why: metrics.members_rejected.labels(why).inc(),
        )
        policy = make_policy(spec.router.policy, prefix_fetches=True)
        core = RouterCore(
            replicas,
            Chooser(policy, max_local_tokens=spec.router.max_local_prefill),
            model=model_config.fingerprint(model_dir, max_context=spec.model.max_context),
            block_size=spec.kv.block_size,
            vocab_size=config.vocab_size,
            queue_s=spec.timeouts.queue_s,
            max_waiting=spec.router.max_waiting,
            metrics=metrics,
            tenant_share=lambda: spec.router.tenant_share if has_many_tenants() else 1.0,
        )
        watch = RevisionWatch(
            connect_redis(credentials.index_url),
            core.revisions,
            name=spec.name,
            key=credentials.key(Purpose.REVISIONS),
            router=identity.name.router,
            known=membership.revisions,
        )
        template = ChatTemplate(
            find_chat_template(model_dir, spec.model.chat_template), special_tokens=tokenizer.special_tokens
        )
        completions = Completions(
            token_service=core,
            tokenizer=tokenizer,
            chat_template=template,
            tool_parser=spec.model.tool_parser,
            reasoning_parser=spec.model.reasoning_parser,
            model=ModelCard(
                id=spec.model.name,
                aliases=spec.model.names[1:],
                root=spec.model.source_name,
                max_context=min(config.max_context, spec.model.max_context or config.max_context),
                vocab_size=config.vocab_size,
                dtype=spec.model.dtype,
                max_choices=min(MAX_CHOICES, spec.decode.max_running),
                max_held=replicas.max_tokens,
                sampling_defaults=sampling_defaults(model_dir, spec.model.generation_config),
            ),
            metrics=metrics,
            max_request_s=spec.timeouts.request_s,
            max_unread_s=spec.timeouts.unread_s,
            audit_log=RequestAuditLog(membership.audit_log),
            traffic=TrafficRecord(credentials.key(Purpose.TRAFFIC), router=identity.name.router),
            grammars=grammars,
            tracing=tracing,
        )
        model = cls(
            completions=completions, core=core, discovery=discovery, revisions=watch, metrics=metrics, tasks=tasks
        )
        try:
            await model._start(spec, credentials, router=identity.name.router, node=node)
        except BaseException:
            await model.close()
            raise
        return model

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host and port of the admin endpoint."""
        assert self.admin
        return self.admin.address

    @property
    def has_read(self) -> bool:
        """True once the deployment's replicas have been read."""
        return self.discovery.has_read

    @property
    def is_failing(self) -> bool:
        """True if its background tasks are crash-looping; reopening the model may help."""
        return bool(self.tasks.failing)

    def health(self) -> dict[str, int]:
        return {role.value: self.core.replicas.num_usable(role) for role in Role}

    def is_ready(self) -> bool:
        """Return whether a replica can answer."""
        return self.core.replicas.may_answer()

    async def changed(self, *, timeout_s: float) -> None:
        """Wait until any replica reports a change. Raises TimeoutError."""
        await self.core.replicas.changed(timeout_s=timeout_s)

    def report_traffic(self, tell: Callable[[TrafficReport], Awaitable[TrafficAnswer]]) -> None:
        """Start sending periodic traffic reports. tell: deliver one report; raises ClusterError."""
        record = self.completions.traffic
        assert record
        reporter = TrafficReporter(
            record,
            self.core.replicas,
            num_waiting=lambda: self.core.admission.num_waiting,
            answered=self._show_scaling,
        )
        self.tasks.start("traffic", lambda: reporter.report_forever(tell))

    async def close(self) -> None:
        """Close the model. Running requests are cut off, so drain them first."""
        self.core.replicas.availability.end()
        if self.admin:
            await self.admin.close()
        await self.discovery.close()
        await self.tasks.close()
        await self.revisions.close()
        await self.core.replicas.close()
        self.completions.close()

    async def _start(self, spec: Spec, credentials: DeploymentSecrets, *, router: str, node: str) -> None:
        self.admin = await AdminServer.open(
            spec,
            credentials,
            router=router,
            node=node,
            core=self.core,
            metrics=self.metrics,
            health=self.health,
            problem=lambda: self.discovery.problem,
            tasks=self.tasks,
        )
        self.discovery.start()
        self.tasks.start("presence", self._watch)
        self.tasks.start("revisions", self.revisions.follow_forever)
        if spec.router.rebalance:
            self.tasks.start("rebalance", self.core.rebalance_forever)
        if spec.router.backup_tokens:
            self.tasks.start("backup", lambda: self.core.back_up_forever(every=spec.router.backup_tokens))

    def _show_scaling(self, decisions: Sequence[ShownDecision]) -> None:
        if self.admin:
            self.admin.show_scaling([asdict(decision) for decision in decisions])

    async def _watch(self) -> None:
        """Update availability periodically, so that its timestamps do not depend on requests."""
        while True:
            self.core.replicas.availability.look()
            await asyncio.sleep(_WATCH_S)


def counting_supervisor(metrics: Metrics) -> Supervisor:
    """Return a supervisor that counts the deaths of its tasks in `metrics`."""
    return Supervisor(died=lambda name: metrics.task_deaths.labels(name.partition(" ")[0]).inc())
