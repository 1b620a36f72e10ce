"""Admin endpoint of one router, for operators only: metrics, page, live view, and routing explanations of requests."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.index.membership import Member
from core.index.redis_client import connect_redis
from core.index.router_addresses import RouterAddresses
from core.process.supervisor import Supervisor
from core.spec.schema import Spec
from core.types.errors import DeployError
from core.types.network import format_address
from frontend.http.app import Methods
from frontend.http.connections import ADMIN, HttpListener
from frontend.http.event_stream import data
from frontend.openai.forms import ChatForm, TextForm
from router.serving.core import RouterCore
from router.telemetry.metrics import CONTENT_TYPE, Metrics
from router.telemetry.view import RouterView

View = Callable[[bool], Mapping[str, Any]]

_HERE = Path(__file__).parent
_UPDATE_S = 0.5
_MAX_WATCHING = 32  # streams; half of the listener's connections
_FILES = {
    "/ui": ("ui.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("ui.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("ui.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_ANY = ("0.0.0.0", "::")
_CLOSE_S = 1.0  # for responses in flight
_ID_OF_ANSWER = re.compile(f"^(?:{ChatForm.id_prefix}|{TextForm.id_prefix})")


@dataclass(frozen=True, eq=False)
class AdminServer:
    """Admin endpoint. Bound to the router's event loop."""

    _listener: HttpListener
    _addresses: RouterAddresses
    _scaling: list[Mapping[str, Any]]

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
        """node: address of this machine for other machines. tasks: supervisor of the background tasks. The rest as in
        create_admin_app. Raises DeployError."""
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
        return self._listener.address

    def show_scaling(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Show the autoscaler's last decisions, the latest first, in RouterView's form."""
        self._scaling[:] = decisions

    async def close(self) -> None:
        await self._listener.close(grace_s=_CLOSE_S)
        await self._addresses.close()


def create_admin_app(
    *,
    deployment: str,
    router: str,
    health: Callable[[], Mapping[str, int]],
    is_ready: Callable[[], bool],
    problem: Callable[[], str] = str,
    metrics: Callable[[], bytes],
    explain_route: Callable[[str], Mapping[str, Any]],
    lives: Callable[[str], Mapping[str, Any]] = lambda request_id: {},
    model: str = "",
    routers: Callable[[], Mapping[str, str]] = dict,
    members: Callable[[], Iterable[Member]] = tuple,
    page: UiPage | None = None,
) -> FastAPI:
    """Return the ASGI application. health: usable replicas by role. is_ready: whether a replica can answer. problem:
    why the router cannot use Redis; empty if it can. metrics: in Prometheus's text format. explain_route: routing of
    the requests with a request or response id; empty if unknown. lives: likewise, their timelines. model: name used by
    clients. routers: admin address by router. members: replicas of the deployment. page: None for none."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Methods, routes=app.routes)
    if page:
        page.add_to(app)

    @app.get("/health")
    async def report_health() -> Response:
        content = {"deployment": deployment, "router": router, "replicas": dict(health()), "problem": problem()}
        return JSONResponse(content, status_code=200 if is_ready() else 503)

    @app.get("/metrics")
    async def report_metrics() -> Response:
        return Response(metrics(), headers={"content-type": CONTENT_TYPE})

    @app.get("/targets")
    async def report_targets() -> Response:
        """Return the document of Prometheus's HTTP service discovery: every router and worker of the deployment."""
        common = {"deployment": deployment, "model": model}
        groups = [{"targets": list(routers().values()), "labels": {**common, "role": "router"}}]
        groups += [
            {"targets": [member.metrics_address], "labels": {**common, "role": member.role, "replica": member.replica}}
            for member in members()
            if member.metrics_address
        ]
        return JSONResponse(groups)

    @app.get("/debug/routes/{request_id:path}")
    async def report_route(request: Request, request_id: str) -> Response:
        return (page and page.rejected(request)) or _lookup(explain_route, request_id)

    @app.get("/debug/lives/{request_id:path}")
    async def report_life(request: Request, request_id: str) -> Response:
        return (page and page.rejected(request)) or _lookup(lives, request_id)

    return app


def _lookup(look: Callable[[str], Mapping[str, Any]], request_id: str) -> Response:
    """Look up a request id, or the id of its response."""
    found = look(request_id) or look(_ID_OF_ANSWER.sub("", request_id))
    return JSONResponse(found, status_code=200 if found else 404)


async def open_admin_listener(app: ASGIApp, *, host: str, ports: Sequence[int]) -> HttpListener:
    """Listen on the first free port: each router of a machine takes the next one. Raises DeployError."""
    for port in ports:
        with contextlib.suppress(DeployError):
            return await HttpListener.open(app, host=host, port=port, limits=ADMIN)
    raise DeployError(
        f"router.admin_port: no port from {ports[0]} to {ports[-1]} on {host} is free; choose another one"
    )


class UiPage:
    """Operator page, at /ui, with an event stream for each open page; updates are serialized once for all. Bound to the
    event loop.

    It loads nothing from other hosts, and inserts values, such as ids and tenants from clients, as text nodes only. Its
    content security policy allows nothing but its own two files. Against DNS rebinding, requests whose Host header is
    not an address or name of this machine are rejected.
    """

    def __init__(self, view: View, *, host: str) -> None:
        """view: returns the current state, with or without the last minutes. host: address of the listener."""
        self._view = view
        self._names = {host.lower(), "localhost", socket.gethostname().lower(), socket.getfqdn().lower()}
        self._num_watching = 0
        self._cached_update: tuple[float, bytes] = (-1.0, b"")

    def add_to(self, app: FastAPI) -> None:
        for path in _FILES:
            app.add_api_route(path, self.file, methods=["GET"])
        app.add_api_route("/ui/events", self.events, methods=["GET"])
        app.add_api_route("/debug/view", self.view, methods=["GET"])

    async def file(self, request: Request) -> Response:
        if rejected := self.rejected(request):
            return rejected
        name, kind = _FILES[request.url.path]
        return Response(await asyncio.to_thread((_HERE / name).read_bytes), media_type=kind, headers=HEADERS)

    async def view(self, request: Request) -> Response:
        return self.rejected(request) or JSONResponse(self._view(True), headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Stream server-sent events: the full state first, then updates twice a second."""
        if rejected := self.rejected(request):
            return rejected
        if request.method == "HEAD":
            head = Response(media_type="text/event-stream", headers=HEADERS)
            del head.headers["content-length"]
            return head
        if self._num_watching >= _MAX_WATCHING:
            return JSONResponse({"error": "too many pages are open"}, status_code=503)
        return StreamingResponse(self._updates(), media_type="text/event-stream", headers=HEADERS)

    async def _updates(self) -> AsyncIterator[bytes]:
        self._num_watching += 1
        try:
            yield data(dict(self._view(True)), name="all")
            while True:
                await asyncio.sleep(_UPDATE_S)
                yield self._now()
        finally:
            self._num_watching -= 1

    def _now(self) -> bytes:
        now = asyncio.get_running_loop().time()
        at, update = self._cached_update
        if now - at >= _UPDATE_S / 2:
            update = data(dict(self._view(False)), name="now")
            self._cached_update = now, update
        return update

    def rejected(self, request: Request) -> Response | None:
        """Return an error response if the Host header is not this machine's. Guards every route with request data."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        with contextlib.suppress(ValueError):  # raised for a host name
            if name in self._names or ipaddress.ip_address(name):
                return None
        text = "Host is not a name of this machine: use its address, or localhost through ssh -L\n"
        return Response(text, status_code=421, media_type="text/plain", headers=HEADERS)
