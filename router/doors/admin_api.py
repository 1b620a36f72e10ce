"""What operators ask a router, and no client may: metrics, what it sees, and why requests went where they went."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from cluster.words.errors import DeployError
from cluster.words.request import Role
from router.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_IDLE_S = 30


def create_admin_app(
    *,
    deployment: str,
    router: str,
    health: Callable[[], Mapping[str, int]],
    metrics: Callable[[], bytes],
    explain_route: Callable[[str], Mapping[str, Any]],
) -> FastAPI:
    """The ASGI application. health: usable replicas by role. metrics: Prometheus's text. explain_route: why the
    requests of an id went where they went; empty when that is not known."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def report_health() -> Response:
        usable = health()
        told = {"deployment": deployment, "router": router, "replicas": dict(usable)}
        return JSONResponse(told, status_code=200 if usable.get(Role.DECODE) else 503)

    @app.get("/metrics")
    async def report_metrics() -> Response:
        return Response(metrics(), headers={"content-type": CONTENT_TYPE})

    @app.get("/debug/routes/{request_id}")
    async def report_route(request_id: str) -> Response:
        found = explain_route(request_id)
        return JSONResponse(found, status_code=200 if found else 404)

    return app


class AdminListener:
    """Serves an application from this process, in its event loop, until `close`."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._server = server
        self._listener = listener
        self._serving = asyncio.ensure_future(server.serve(sockets=[listener]))

    @classmethod
    def open(cls, app: ASGIApp, *, host: str, ports: Sequence[int]) -> AdminListener:
        """On the first of these ports that is free: routers of one machine take them in turn. Raises DeployError."""
        listener = _listen(host, ports)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
        )
        return cls(_Server(config), listener)

    async def close(self) -> None:
        self._server.should_exit = True
        await self._serving
        self._listener.close()


class _Server(uvicorn.Server):
    """Leaves this process's signals alone: they are its owner's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    raise DeployError(
        f"router.admin_port: no port from {ports[0]} to {ports[-1]} on {host} is free; choose another one"
    )
