"""An ASGI application on a port of this process, in its event loop: the HTTP door, and what operators ask."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from contextlib import suppress
from dataclasses import replace

from starlette.types import ASGIApp
from uvicorn.config import Config

from core.types.errors import DeployError
from frontend.http.certificates import Certificates
from frontend.http.connections import ConnectionLimits
from frontend.http.http_connection import Connections, HttpConnection

_LAST_WORDS_S = 1.0  # for what has ended to be heard
_BACKLOG = 4096
_PROBE_S = 10  # a client from whom nothing has been heard for so long is asked whether it is there, and again
_UNSENT_BYTES = 64 << 10  # that the kernel holds of an answer, beside what is on its way


class HttpListener:
    """Serves until `close`."""

    def __init__(self, server: asyncio.Server, connections: Connections, address: tuple[str, int]) -> None:
        self.address = address
        self._server = server
        self._connections = connections

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        limits: ConnectionLimits,
        is_port_shared: bool = False,
        certificates: Certificates | None = None,
        max_unread_s: float = 60.0,
    ) -> HttpListener:
        """Start to serve on host:port (0: any free one), in this event loop; with TLS where there are certificates.

        is_port_shared: several processes of one node listen on the same port, and the kernel deals out connections.
        max_unread_s: how long a client may leave an answer unread; twice that, for a request has the same limit, and
        says more. Raises DeployError.
        """
        try:
            listener = _listen(host, port, is_port_shared=is_port_shared, vanished_s=2 * max_unread_s)
        except OSError as error:
            raise DeployError(f"HTTP port {host}:{port} cannot be opened; is it in use?") from error
        connections = Connections(_with_files(limits), max_unread_s=2 * max_unread_s)
        config = Config(
            app,
            log_config=None,
            log_level=logging.ERROR,  # what is no HTTP is no news
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # a time for call_later
        )
        config.load()
        server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(connections, config),
            sock=listener,
            backlog=_BACKLOG,
            ssl=certificates.for_http() if certificates else None,
            ssl_handshake_timeout=limits.open_s if certificates else None,
        )
        return cls(server, connections, listener.getsockname()[:2])

    async def close(self, *, grace_s: float) -> None:
        """Take no more, let what is under way finish for grace_s, then end all."""
        self._server.close()
        self._connections.finish()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._connections.all_gone.wait()
        self._connections.abort()
        if tasks := set(self._connections.state.tasks):  # they hear that their client has gone
            _, late = await asyncio.wait(tasks, timeout=_LAST_WORDS_S)
            for task in late:
                task.cancel()


def _with_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Connections may have half of the files that this process may open."""
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
        "TCP_USER_TIMEOUT": round(1e3 * vanished_s),  # until it is taken for gone, also where it lets nothing through
        "TCP_NOTSENT_LOWAT": _UNSENT_BYTES,
        # Else the first token waits until the client has told that it has the header: 40 ms, where it takes its time.
        # asyncio sets it on sockets alone that were made with TCP's number, which create_server()'s are not.
        "TCP_NODELAY": 1,
    }
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():  # connections inherit them
        if hasattr(socket, name):  # some are Linux's alone
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener
