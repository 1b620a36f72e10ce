"""Admin endpoint of one router, wired to its metrics, live view and the addresses of the other routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.index.redis_client import connect_redis
from core.index.router_addresses import RouterAddresses
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.types.network import format_address
from frontend.admin.admin_api import create_admin_app, open_admin_listener
from frontend.admin.ui_page import UiPage
from frontend.http.http_listener import HttpListener
from router.serving.core import RouterCore
from router.telemetry.metrics import Metrics
from router.telemetry.view import RouterView

_ANY = ("0.0.0.0", "::")
_CLOSE_S = 1.0  # for responses in flight


class AdminServer:
    """Admin endpoint. Bound to the router's event loop."""

    def __init__(self, listener: HttpListener, addresses: RouterAddresses, scaling: list[Mapping[str, Any]]) -> None:
        self._listener = listener
        self._addresses = addresses
        self._scaling = scaling

    @classmethod
    async def open(
        cls,
        spec: Spec,
        credentials: DeploymentSecrets,
        *,
        router: str,
        node: str,
        core: RouterCore,
        metrics: Metrics,
        health: Callable[[], Mapping[str, int]],
        problem: Callable[[], str],
        tasks: Supervisor,
    ) -> AdminServer:
        """node: address of this machine for other machines. health: number of usable replicas by role. problem:
        why Redis does not serve this router; empty if it does. tasks:
        supervisor of the background tasks. Raises DeployError."""
        known: dict[str, str] = {}
        scaling: list[Mapping[str, Any]] = []
        view = RouterView(
            deployment=spec.name,
            router=router,
            replicas=core.replicas,
            metrics=metrics,
            decisions=core.decisions,
            flows=core.flows,
            routers=lambda: known,
            autoscaler=lambda: scaling,
        )
        app = create_admin_app(
            deployment=spec.name,
            model=spec.model.name,
            router=router,
            health=health,
            is_ready=core.replicas.may_answer,
            problem=problem,
            metrics=metrics.render,
            explain_route=core.decisions.explain,
            lives=core.decisions.lives,
            routers=lambda: known,
            members=lambda: [replica.member for replica in core.replicas],
            page=UiPage(lambda has_history: view.now(has_history=has_history), host=spec.router.admin_host),
        )
        listener = await open_admin_listener(app, host=spec.router.admin_host, ports=spec.router.admin_ports)
        host, port = listener.address
        addresses = RouterAddresses(
            connect_redis(credentials.index_url),
            known,
            name=spec.name,
            key=credentials.key(Purpose.ROUTERS),
            router=router,
            address=format_address(node if host in _ANY else host, port),
        )
        tasks.start("addresses", addresses.run)
        tasks.start("view", view.run)
        return cls(listener, addresses, scaling)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the listener."""
        return self._listener.address

    def show_scaling(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Show the autoscaler's last decisions, the latest first, in RouterView's form."""
        self._scaling[:] = decisions

    async def close(self) -> None:
        await self._listener.close(grace_s=_CLOSE_S)
        await self._addresses.close()
