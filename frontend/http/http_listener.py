"""uvicorn server of an ASGI application, in the caller's event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.types.errors import DeployError
from core.types.network import format_address
from frontend.http.connections import Certificates, HttpLimits
from frontend.http.event_stream import json_answer
from frontend.openai.errors import http_error

_LAST_WORDS_S = 1.0  # for cancelled requests to release what they hold
_BACKLOG = 4096
_PROBE_S = 10  # between TCP keepalive probes of a silent client
_UNSENT_BYTES = 64 << 10  # of an answer in the kernel's buffer, beyond the bytes in flight


class HttpListener:
    """Server, from `open` until `close`."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket, connections: _Connections) -> None:
        self._connections = connections
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._server = server
        self._serving = asyncio.create_task(server.serve(sockets=[listener]))

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        limits: HttpLimits,
        is_port_shared: bool = False,
        certificates: Certificates | None = None,
        max_unread_s: float = 60.0,
    ) -> HttpListener:
        """Serve `app` on host:port (0: any free port), with TLS if there are certificates. Raises DeployError.

        is_port_shared: several processes of one node listen on the same port, and the kernel distributes connections.
        max_unread_s: time after which a request with unread tokens ends with an error message. The kernel resets a
        silent connection only after twice that time, so that the message goes first.
        """
        try:
            listener = _listen(host, port, is_port_shared=is_port_shared, vanished_s=2 * max_unread_s)
        except OSError as error:
            raise DeployError(
                f"HTTP port {format_address(host, port)} cannot be opened; it is in use, or not an address of this "
                f"host: {error.strerror}"
            ) from error
        limits = _with_files(limits)
        connections = _Connections(app, limits)
        config = uvicorn.Config(
            connections,
            http="h11",  # bounds a header before it is complete, and reads the body of a request that offers h2c
            h11_max_incomplete_event_size=4 * limits.header_bytes,  # up to that size, the rejection is JSON
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.idle_s,
            backlog=_BACKLOG,
            ssl_context_factory=(lambda config, default: certificates.for_http()) if certificates else None,
            log_config=None,
            log_level=logging.ERROR,  # a client's invalid request is not logged
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
        )
        config.load()
        return cls(_Server(config), listener, connections)

    def send_away(self) -> None:
        """End each connection with its next response, so that clients connect elsewhere. Requests are still taken."""
        self._connections.are_ending = True

    async def close(self, *, grace_s: float) -> None:
        """Accept no more connections, let running requests finish for grace_s, then cancel them."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        await self._serving
        if cancelled := set(self._server.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_LAST_WORDS_S)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: the server is one part of it."""
        yield


class _Connections:
    """ASGI middleware: reject a request whose header is too large, and end the connections once asked to."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self.are_ending = False  # each connection ends with its next response
        self._app = app
        self._limits = limits
        problem = f"the header of the request is larger than {limits.header_bytes} bytes or {limits.headers} fields"
        self._rejection = json_answer(http_error("Request Header Fields Too Large", problem), {"connection": "close"})
        self._rejection.status_code = 431

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._rejection if scope["type"] == "http" and self._is_too_large(scope) else self._app
        try:
            await app(scope, receive, _ending(send) if self.are_ending else send)
        except asyncio.CancelledError:
            # uvicorn cancels requests that outlive the grace time, and would log a traceback for each.
            return

    def _is_too_large(self, scope: Scope) -> bool:
        headers = scope["headers"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        return num_bytes > self._limits.header_bytes or len(headers) > self._limits.headers


def _ending(send: Send) -> Send:
    def send_ending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["connection"] = "close"
        return send(message)

    return send_ending


def _with_files(limits: HttpLimits) -> HttpLimits:
    """Limit connections to half of this process's open-file limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limits if soft == resource.RLIM_INFINITY else replace(limits, connections=min(limits.connections, soft // 2))


def _listen(host: str, port: int, *, is_port_shared: bool, vanished_s: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((host, port), family=family, reuse_port=is_port_shared, dualstack_ipv6=both)
    listener.setblocking(False)
    options = {
        "TCP_KEEPIDLE": _PROBE_S,
        "TCP_KEEPINTVL": _PROBE_S,
        "TCP_USER_TIMEOUT": round(1e3 * vanished_s),  # also for a client whose receive window stays closed
        "TCP_NOTSENT_LOWAT": _UNSENT_BYTES,
        # Without it, the first token waits until the client acknowledges the header: 40 ms with delayed
        # acknowledgements. asyncio sets it only on sockets made with TCP's number, which create_server()'s are not.
        "TCP_NODELAY": 1,
    }
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():  # accepted connections inherit them
        if hasattr(socket, name):  # some exist only on Linux
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener
