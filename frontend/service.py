"""One router process: access control, the gRPC and HTTP endpoints, and the models of its own deployment and of attached
deployments.

Independent of Ray: `cluster` runs it inside a Serve replica, tests run it directly.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from core.identity.credentials import Identity
from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.types.api_key import KeyRegistry
from core.types.network import format_address, is_loopback
from core.types.revisions import RevisionTable
from frontend.access.access import Access
from frontend.attached_deployments import AttachedDeployments, FindAttached
from frontend.grpc.api import GrpcApi, open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import HTTP_ENDPOINT, Certificates, HttpListener
from frontend.responses.store import StoreBounds
from frontend.responses.stored import StoredResponses
from frontend.served_model import RouterMembership, ServedModel, counting_supervisor
from frontend.text.completion import Models
from router.serving.discovery import FindMembers
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_WATCH_S = 1.0


@dataclass(eq=False, kw_only=True)
class RouterService:
    """Router with its endpoints and models. Create with `open`, on the event loop that serves it."""

    own: ServedModel
    attached_deployments: AttachedDeployments
    served: Models
    access: Access
    stored: StoredResponses
    tracing: Tracing | None
    tasks: Supervisor
    grpc: GrpcApi = field(init=False)
    http: HttpListener = field(init=False)
    drain_s: float
    shutdown_delay_s: float
    is_closing: bool = False

    @classmethod
    async def open(
        cls,
        spec: Spec,
        *,
        credentials: DeploymentSecrets,
        identity: Identity,
        host: str = "127.0.0.1",
        node: str | None = None,
        audit_log: Path | None = None,
        keys: KeyRegistry | None = None,
        revisions: RevisionTable | None = None,
        find_attached: FindAttached | None = None,
        find_members: FindMembers | None = None,
    ) -> RouterService:
        """Load the models, discover the replicas and open both endpoints. Raises SpecError, DeployError.

        identity, audit_log, revisions, find_members: see RouterMembership. host: address that the endpoints bind to.
        node: address of this machine for other machines; None: `host`. keys: API keys from the controller; None: read
        them from Redis alone. find_attached: list the attached deployments; None: there are none.
        """
        metrics = Metrics()
        tasks = counting_supervisor(metrics)
        access = await Access.follow(
            credentials,
            name=spec.name,
            is_required=spec.router.needs_keys(host),
            reports_cached_tokens=is_loopback(host),
            num_routers=spec.router.replicas,
            tasks=tasks,
            count=lambda outcome: metrics.requests.labels(outcome).inc(),
            known=keys,
        )
        tracing = Tracing.of(spec.tracing, deployment=spec.name, router=identity.name.router)
        open_model = partial(
            ServedModel.open,
            node=node or host,
            has_many_tenants=lambda: access.has_many_tenants,
            tracing=tracing,
        )
        membership = RouterMembership(
            identity=identity, audit_log=audit_log, revisions=revisions, find_members=find_members
        )
        own = await open_model(spec, credentials=credentials, membership=membership, metrics=metrics, tasks=tasks)
        models = Models(own.completions)
        attached_deployments = AttachedDeployments(models, find_attached, open_model)
        # Wait for attached deployments, so that a replacement router serves the same models as its predecessor.
        await attached_deployments.settle()
        router = spec.router
        stored = StoredResponses.in_redis(
            credentials.index_url,
            name=spec.name,
            key=credentials.key(Purpose.RESPONSES),
            bounds=StoreBounds(max_bytes=router.stored_responses_mib * 2**20, ttl_s=router.stored_responses_s),
        )
        service = cls(
            own=own,
            attached_deployments=attached_deployments,
            served=models,
            access=access,
            stored=stored,
            tracing=tracing,
            tasks=tasks,
            drain_s=spec.timeouts.drain_s,
            shutdown_delay_s=router.shutdown_delay(host),
        )
        await service._open_endpoints(spec, host=host)
        tasks.start("health", service._watch)
        if attached_deployments.is_enabled:
            tasks.start("attached-deployments", attached_deployments.follow_forever)
        logger.info(
            "router open router=%s grpc=%s http=%s admin=%s",
            identity.name.router,
            format_address(host, service.grpc_port),
            format_address(*service.http_address),
            format_address(*service.admin_address),
        )
        return service

    @property
    def grpc_port(self) -> int:
        return self.grpc.port

    @property
    def http_address(self) -> tuple[str, int]:
        return self.http.address

    @property
    def admin_address(self) -> tuple[str, int]:
        return self.own.admin_address

    def is_live(self) -> bool:
        """Return False if background tasks keep dying, so that the process is replaced. Excludes attached deployments,
        whose tasks this router restarts itself."""
        return not self.tasks.failing

    def is_ready(self) -> bool:
        """Return whether at least one model can be served, and the router is not closing."""
        return not self.is_closing and (self.own.is_ready() or self.attached_deployments.is_any_ready())

    async def close(self) -> None:
        """Report not ready for the shutdown delay, drain running requests for at most `drain_s`, and close.

        New calls are served during the delay, because load balancers notice only at their next health check. Another
        call of `close` skips the delay.
        """
        delay_s = 0.0 if self.is_closing else self.shutdown_delay_s
        self.is_closing = True
        self.grpc.set_health(is_live=self.is_live(), is_ready=False)
        self.http.send_away()
        await asyncio.sleep(delay_s)
        await asyncio.gather(self.grpc.close(grace_s=self.drain_s), self.http.close(grace_s=self.drain_s))
        await self.access.close()
        await self.stored.close()
        await self.attached_deployments.close()
        # Stops the background tasks, too.
        await self.own.close()
        if self.tracing:
            await asyncio.to_thread(self.tracing.close)

    async def _open_endpoints(self, spec: Spec, *, host: str) -> None:
        """Open the gRPC and HTTP endpoints. Routers of one machine share both ports."""
        router, is_port_shared = spec.router, spec.router.replicas > 1
        self.grpc = await open_grpc_api(
            self.served,
            access=self.access,
            host=host,
            port=router.grpc_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
        )
        app = create_app(
            self.served,
            access=self.access,
            is_healthy=self.is_ready,
            probes={"live": self.is_live, "ready": self.is_ready, "startup": lambda: self.own.has_read},
            spec=router,
            stored=self.stored,
        )
        self.http = await HttpListener.open(
            app,
            host=host,
            port=router.http_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
            limits=HTTP_ENDPOINT,
            max_unread_s=spec.timeouts.unread_s,
        )

    async def _watch(self) -> None:
        """Keep the gRPC health service in step with the replicas."""
        while True:
            self.grpc.set_health(is_live=self.is_live(), is_ready=self.is_ready())
            with suppress(TimeoutError):
                await self.own.changed(timeout_s=_WATCH_S)
