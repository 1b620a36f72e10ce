"""Admin endpoint of a router, for operators only: metrics, live view, and routing explanations of requests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from core.index.membership import Member
from core.types.errors import DeployError
from frontend.admin.ui_page import UiPage
from frontend.http.app import Methods
from frontend.http.connections import ADMIN
from frontend.http.http_listener import HttpListener
from frontend.openai.forms import ChatForm, TextForm
from router.telemetry.metrics import CONTENT_TYPE

_ID_OF_ANSWER = re.compile(f"^(?:{ChatForm.id_prefix}|{TextForm.id_prefix})")


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
    why Redis does not serve it; empty if it does. metrics: Prometheus's text. explain_route: the routing of the
    requests of an id, or of an answer's; empty if unknown. lives: likewise, their timelines. model: name used by
    clients. routers: admin address by router. members: the replicas of the deployment. page: None: there is none."""
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
    """Listen on the first free port; routers of one machine take them in turn. Raises DeployError."""
    for port in ports:
        with contextlib.suppress(DeployError):
            return await HttpListener.open(app, host=host, port=port, limits=ADMIN)
    raise DeployError(
        f"router.admin_port: no port from {ports[0]} to {ports[-1]} on {host} is free; choose another one"
    )
