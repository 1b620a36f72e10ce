"""Connections of clients: their limits (docs/SECURITY.md, section 3, shows them to operators), the TLS certificate of
an endpoint, and the uvicorn server of an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import grpc
import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.types.errors import DeployError
from core.types.network import format_address
from core.wire.channel import renewable
from frontend.http.event_stream import json_answer
from frontend.openai.errors import http_error

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # for cancelled requests to release what they hold
_BACKLOG = 4096
_PROBE_S = 10  # between TCP keepalive probes of a silent client
_UNSENT_BYTES = 64 << 10  # of an answer in the kernel's buffer, beyond the bytes in flight


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the gRPC endpoint."""

    header_bytes: int = 16 << 10  # names and values of one request, with its path
    open_s: float = 10.0  # for the TLS handshake and the HTTP/2 preface
    message_s: float = 60.0  # for the request message
    idle_s: float = 600.0  # without a call
    age_s: float = 3600.0  # the client must connect again after that time
    streams: int = 4096  # per connection


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of an HTTP endpoint."""

    header_bytes: int = 16 << 10  # path, query, names and values of one request
    headers: int = 100
    message_s: float = 60.0  # for the request body
    idle_s: int = 60  # between two requests on a connection
    connections: int = 16_384  # beyond this number, each new request is rejected with 503


GRPC_ENDPOINT = ConnectionLimits()
HTTP_ENDPOINT = HttpLimits()
ADMIN = HttpLimits(idle_s=30, connections=64)


class Certificates:
    """Certificate and key of one endpoint. The files are checked on each new connection; a changed pair is used from
    then on. Thread-safe: gRPC checks on its own threads."""

    def __init__(self, certificate: str, key: str) -> None:
        """certificate: PEM chain, the endpoint's own certificate first. key: PEM private key. Raises DeployError."""
        self._certificate = Path(certificate)
        self._key = Path(key)
        self._seen = self._stamp()
        self._first = self._read()

    @classmethod
    def of(cls, certificate: str | None, key: str | None) -> Certificates | None:
        """Return None, meaning no TLS, unless both files are given."""
        return cls(certificate, key) if certificate and key else None

    def for_grpc(self) -> grpc.ServerCredentials:
        def reload() -> grpc.ServerCertificateConfiguration | None:
            pair = self._reload()
            return pair and pair.for_grpc()

        return renewable(self._first.for_grpc(), reload)

    def for_http(self) -> ssl.SSLContext:
        current = self._first.context

        def select(connection: ssl.SSLObject, *_: object) -> None:
            nonlocal current
            if pair := self._reload():
                current = pair.context
            connection.context = current

        first = current
        first.sni_callback = select  # also called for clients that send no server name
        return first

    def _reload(self) -> _Pair | None:
        """Return a new pair, or None if unchanged. A mismatched pair is skipped: it may be half written."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            pair = self._read()
        except DeployError as error:
            logger.warning("keeping the old certificate: %s", error)
            return None
        self._seen = stamp
        logger.info("certificate reloaded path=%s", self._certificate)
        return pair

    def _read(self) -> _Pair:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with self._unreadable():
            context.load_cert_chain(self._certificate, self._key)
            return _Pair(self._certificate.read_bytes(), self._key.read_bytes(), context)

    def _stamp(self) -> tuple[int, int, int, int]:
        with self._unreadable():
            found = [path.stat() for path in (self._certificate, self._key)]
        return found[0].st_mtime_ns, found[0].st_ino, found[1].st_mtime_ns, found[1].st_ino

    @contextmanager
    def _unreadable(self) -> Iterator[None]:
        """Convert an OSError of reading the files to DeployError."""
        try:
            yield
        except OSError as error:  # also ssl.SSLError
            raise DeployError(f"router.tls_cert {self._certificate}, router.tls_key {self._key}: {error}") from None


class _Pair(NamedTuple):
    certificate: bytes
    key: bytes
    context: ssl.SSLContext  # made of both

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)])


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
        """Install no signal handlers: the process, of which the server is one part, has its own."""
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
