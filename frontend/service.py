"""One router process: access control, the gRPC and HTTP endpoints, and the models of its own deployment and of attached
deployments.

Independent of Ray: `cluster` runs it inside a Serve replica, tests run it directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from core.identity.credentials import Identity
from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.trace.traffic import TrafficAnswer, TrafficReport
from core.types.api_key import KeyRegistry
from core.types.network import format_address, is_loopback
from core.types.revisions import RevisionTable
from frontend.access.access import Access
from frontend.admin.health_api import HealthProbes
from frontend.attached_deployments import AttachedDeployments, FindAttached
from frontend.grpc.api import GrpcApi, open_grpc_api
from frontend.http.app import create_app
from frontend.http.certificates import Certificates
from frontend.http.connections import HTTP_ENDPOINT
from frontend.http.http_listener import HttpListener
from frontend.responses.store import StoreBounds
from frontend.responses.stored import StoredResponses
from frontend.served_model import ServedModel
from frontend.text.models import Models
from router.serving.discovery import FindMembers
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_WATCH_S = 1.0


class RouterService:
    """Router with its endpoints and models. Create with `open`, on the event loop that serves it."""

    def __init__(
        self,
        own: ServedModel,
        attached_deployments: AttachedDeployments,
        models: Models,
        access: Access,
        stored: StoredResponses,
        *,
        tracing: Tracing | None,
        tasks: Supervisor,
        drain_s: float,
        shutdown_delay_s: float,
    ) -> None:
        self._own = own
        self._attached_deployments = attached_deployments
        self._models = models
        self._access = access
        self._stored = stored
        self._tracing = tracing
        self._grpc: GrpcApi | None = None
        self._http: HttpListener | None = None
        self._drain_s = drain_s
        self._shutdown_delay_s = shutdown_delay_s
        self._is_closing = False
        self._tasks = tasks

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

        identity: its router name is unique within the deployment. host: address that the endpoints bind to. node:
        address of this machine for other machines; None: `host`. audit_log: file with one line per request. keys,
        revisions: API keys and serving revisions from the controller; None: read them from Redis alone.
        find_attached: list the attached deployments; None: there are none. find_members: see Discovery.
        """
        metrics = Metrics()
        tasks = Supervisor(died=lambda name: metrics.task_deaths.labels(name.partition(" ")[0]).inc())
        access = await Access.follow(
            credentials.index_url,
            name=spec.name,
            signing_key=credentials.key(Purpose.API_KEYS),
            salt_key=credentials.key(Purpose.SALTS),
            is_required=spec.router.needs_keys(host),
            reports_cached_tokens=is_loopback(host),
            num_routers=spec.router.replicas,
            tasks=tasks,
            count=lambda outcome: metrics.requests.labels(outcome).inc(),
            known=keys,
        )
        tracing = Tracing.of(spec.tracing, deployment=spec.name, router=identity.name.router)
        own = await ServedModel.open(
            spec,
            credentials=credentials,
            identity=identity,
            metrics=metrics,
            tasks=tasks,
            node=node or host,
            audit_log=audit_log,
            revisions=revisions,
            find_members=find_members,
            has_many_tenants=lambda: access.has_many_tenants,
            tracing=tracing,
        )
        models = Models(own.completions)
        attached_deployments = AttachedDeployments(
            models, find_attached, node=node or host, has_many_tenants=lambda: access.has_many_tenants, tracing=tracing
        )
        # Wait for attached deployments, so that a replacement router serves the same models as its predecessor.
        await attached_deployments.settle()
        stored = StoredResponses.in_redis(
            credentials.index_url,
            name=spec.name,
            key=credentials.key(Purpose.RESPONSES),
            bounds=StoreBounds(
                max_bytes=spec.router.stored_responses_mib * 2**20, ttl_s=spec.router.stored_responses_s
            ),
        )
        service = cls(
            own,
            attached_deployments,
            models,
            access,
            stored,
            tracing=tracing,
            tasks=tasks,
            drain_s=spec.timeouts.drain_s,
            shutdown_delay_s=spec.router.shutdown_delay(host),
        )
        await service._open_endpoints(spec, host=host)
        service._start()
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
        assert self._grpc
        return self._grpc.port

    @property
    def http_address(self) -> tuple[str, int]:
        assert self._http
        return self._http.address

    @property
    def admin_address(self) -> tuple[str, int]:
        """Host and port of the admin endpoint."""
        return self._own.admin_address

    def health(self) -> dict[str, int]:
        """Return the number of usable replicas of each role of its own deployment."""
        return self._own.health()

    @property
    def models(self) -> Sequence[str]:
        """Names of the served models, its own deployment's first."""
        return self._models.names

    @property
    def probes(self) -> HealthProbes:
        return HealthProbes(live=self.is_live, ready=self.is_ready, startup=lambda: self._own.has_read)

    def is_live(self) -> bool:
        """Return False if background tasks keep dying, so that the process is replaced. Excludes attached deployments,
        whose tasks this router restarts itself."""
        return not self._tasks.failing

    def is_ready(self) -> bool:
        """Return whether at least one model can be served, and the router is not closing."""
        return not self._is_closing and self._is_healthy()

    def report_traffic(self, tell: Callable[[TrafficReport], Awaitable[TrafficAnswer]]) -> None:
        """Start traffic reports of its own deployment; see ServedModel.report_traffic."""
        self._own.report_traffic(tell)

    async def close(self) -> None:
        """Report not ready for the shutdown delay, drain running requests for at most `drain_s`, and close.

        New calls are served during the delay, because load balancers notice only at their next health check. Another
        call of `close` skips the delay.
        """
        delay_s = 0.0 if self._is_closing else self._shutdown_delay_s
        self._is_closing = True
        if self._grpc:
            self._grpc.set_health(is_live=self.is_live(), is_ready=False)
        if self._http:
            self._http.send_away()
        await asyncio.sleep(delay_s)
        endpoints = [endpoint for endpoint in (self._grpc, self._http) if endpoint]
        await asyncio.gather(*(endpoint.close(grace_s=self._drain_s) for endpoint in endpoints))
        await self._access.close()
        await self._stored.close()
        await self._attached_deployments.close()
        # Stops the background tasks, too.
        await self._own.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    async def _open_endpoints(self, spec: Spec, *, host: str) -> None:
        """Open the gRPC and HTTP endpoints. Routers of one machine share both ports."""
        router, is_port_shared = spec.router, spec.router.replicas > 1
        self._grpc = await open_grpc_api(
            self._models,
            access=self._access,
            host=host,
            port=router.grpc_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
        )
        app = create_app(
            self._models,
            access=self._access,
            is_healthy=self.is_ready,
            probes=self.probes,
            spec=router,
            stored=self._stored,
        )
        self._http = await HttpListener.open(
            app,
            host=host,
            port=router.http_port,
            is_port_shared=is_port_shared,
            certificates=Certificates.of(router.tls_cert, router.tls_key),
            limits=HTTP_ENDPOINT,
            max_unread_s=spec.timeouts.unread_s,
        )

    def _start(self) -> None:
        """Start the background tasks."""
        self._tasks.start("health", self._watch)
        if self._attached_deployments.is_enabled:
            self._tasks.start("attached-deployments", self._attached_deployments.follow_forever)

    def _is_healthy(self) -> bool:
        return self._own.is_ready() or self._attached_deployments.is_any_ready()

    async def _watch(self) -> None:
        """Keep the gRPC health service in step with the replicas."""
        while True:
            assert self._grpc
            self._grpc.set_health(is_live=self.is_live(), is_ready=self.is_ready())
            try:
                await self._own.changed(timeout_s=_WATCH_S)
            except TimeoutError:
                pass
