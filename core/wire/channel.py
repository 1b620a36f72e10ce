"""gRPC channels and servers between our own processes: limits, keepalive and TLS.

The streams of a killed peer end within milliseconds. Keepalive detects a silent peer (stopped, partitioned) within
about three seconds. Keepalive time, keepalive timeout and ping timeout must all be set; otherwise the ping timeout's
default of a minute applies. It is two seconds, because a process on an overloaded host has missed a timeout of one.
Clients with a single endpoint cannot retry elsewhere and wait longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from core.identity.credentials import Identity, TlsCredentials
from core.identity.process_name import ProcessName
from core.wire.authorization import Guard

MAX_MESSAGE_BYTES = 64 << 20  # a 1M-token prompt has 4 MB; KV is not sent over these channels
PING_EVERY_S = 1.0  # while the peer is silent; it is lost two seconds later
_ANSWER_WITHIN_S = 2.0
_GO_ON_S = 0.25  # lets running handshakes finish, which needs a time slice; new handshakes wait


def keepalive(*, ping_every_ms: int, answer_within_ms: int) -> list[tuple[str, Any]]:
    """Return the options that detect a silent peer, for either side of a connection."""
    return [
        ("grpc.keepalive_time_ms", ping_every_ms),
        ("grpc.keepalive_timeout_ms", answer_within_ms),
        ("grpc.http2.ping_timeout_ms", answer_within_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


# Without these two a server answers clients' pings with GOAWAY and kills a quiet stream after five seconds.
PINGS_ALLOWED: list[tuple[str, Any]] = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is not meant for internal traffic
]
_PEER_OPTIONS = [
    *_CHANNEL_OPTIONS,
    *keepalive(ping_every_ms=round(1e3 * PING_EVERY_S), answer_within_ms=round(1e3 * _ANSWER_WITHIN_S)),
]
CLIENT_OPTIONS = [*_CHANNEL_OPTIONS, *keepalive(ping_every_ms=10_000, answer_within_ms=20_000)]
# With several endpoints, calls rotate among the connected ones. A silent endpoint is removed after 2.5 s.
_ENDPOINT_OPTIONS = [
    *_CHANNEL_OPTIONS,
    *keepalive(ping_every_ms=500, answer_within_ms=2000),
    ("grpc.lb_policy_name", "round_robin"),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_PEER_OPTIONS,
    *PINGS_ALLOWED,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),  # equals the client's connect timeout
]


def to_endpoints(endpoints: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the target and the options of a client channel to "host:port" or "host:port,host:port"."""
    if "," not in endpoints:
        return endpoints, CLIENT_OPTIONS
    return f"{'ipv6' if endpoints.startswith('[') else 'ipv4'}:{endpoints}", _ENDPOINT_OPTIONS


def open_channel(address: str, *, peer: ProcessName, identity: Identity) -> aio.Channel:
    """Open a channel to another process of the deployment. Connects on first use.

    With TLS the connection is mutual, and only a peer whose certificate names `peer` is accepted. The channel uses the
    identity's current certificate for its lifetime. An open connection outlives the certificate, but reconnecting fails
    once it has expired; for calls that start later use `open_lasting_channel`.
    """
    if (tls_credentials := identity.tls_credentials) is None:
        return aio.insecure_channel(address, options=_PEER_OPTIONS)
    own = tls_credentials.certificate
    credentials = grpc.ssl_channel_credentials(own.authorities, tls_credentials.key, own.chain)
    options = [*_PEER_OPTIONS, ("grpc.ssl_target_name_override", peer.host)]
    return aio.secure_channel(address, credentials, options=options)


def open_lasting_channel(address: str, *, peer: ProcessName, identity: Identity) -> LastingChannel:
    """Open a channel that uses renewed certificates without breaking running calls."""
    return LastingChannel(lambda: open_channel(address, peer=peer, identity=identity), identity)


def make_server(identity: Identity) -> aio.Server:
    """Return a server of this process. Add servicers, then call `listen`.

    With TLS, core.identity.rules decides about each call.
    """
    guards = [Guard(identity.name)] if identity.tls_credentials else []
    return aio.server(options=_SERVER_OPTIONS, interceptors=guards)


def listen(server: aio.Server, address: str, identity: Identity) -> int:
    """Open a port, with mutual TLS if `identity` has credentials, and return its number. Raises RuntimeError.

    Renewed certificates are used from the next handshake on.
    """
    if identity.tls_credentials is None:
        return int(server.add_insecure_port(address))

    last = identity.tls_credentials

    def newer() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        if (tls_credentials := identity.tls_credentials) is None or tls_credentials is last:
            return None
        last = tls_credentials
        return _server_side(tls_credentials)

    credentials = renewable(_server_side(last), newer, asks_clients=True)
    return int(server.add_secure_port(address, credentials))


def _server_side(tls_credentials: TlsCredentials) -> grpc.ServerCertificateConfiguration:
    own = tls_credentials.certificate
    return grpc.ssl_server_certificate_configuration([(tls_credentials.key, own.chain)], own.authorities)


def renewable(
    first: grpc.ServerCertificateConfiguration,
    newer: Callable[[], grpc.ServerCertificateConfiguration | None],
    *,
    asks_clients: bool = False,
) -> grpc.ServerCredentials:
    """Return a server's TLS credentials that can be renewed while clients connect.

    newer: called at each handshake, on a gRPC thread; returns None if unchanged. asks_clients: mutual TLS.

    gRPC (1.85) asks for a newer certificate at each handshake, under a lock, and frees the old one at once. A handshake
    on another thread that has read the old one and uses it without the lock then crashes the process. A new certificate
    per handshake crashed it after some hundred concurrent handshakes, which any client can start. So a certificate is
    returned only when there is a new one, after a sleep under gRPC's lock in which running handshakes can finish.
    """

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        if found := newer():
            time.sleep(_GO_ON_S)
        return found

    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=asks_clients)


@dataclass(eq=False)
class _Line:
    """One gRPC channel and the credentials that it was opened with."""

    channel: aio.Channel
    tls_credentials: TlsCredentials | None
    num_calls: int = 0


class LastingChannel:
    """Channel for generated stubs. Calls that start after a renewal use a connection with the new certificate; running
    calls stay on the old connection, which is closed after the last of them.

    `open` opens a gRPC channel with the current credentials of `identity`. Lives on one event loop.
    """

    def __init__(self, open: Callable[[], aio.Channel], identity: Identity) -> None:
        self._open = open
        self._identity = identity
        self._line = self._new_line()
        self._old: set[_Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("unary_unary", method, codec)

    def unary_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("unary_stream", method, codec)

    def stream_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("stream_stream", method, codec)

    async def close(self) -> None:
        """Close all connections. Running calls are cancelled."""
        lines = [self._line, *self._old]
        await asyncio.gather(*(line.channel.close() for line in lines), *self._closing)

    def _calls(self, kind: str, method: tuple[Any, ...], codec: dict[str, Any]) -> Callable[..., Any]:
        """Return a callable that starts each call on the connection of that moment."""

        def call(*args: Any, **kwargs: Any) -> Any:
            line = self._present()
            running = getattr(line.channel, kind)(*method, **codec)(*args, **kwargs)
            line.num_calls += 1
            running.add_done_callback(lambda _: self._ended(line))
            return running

        return call

    def _present(self) -> _Line:
        before = self._line
        if before.tls_credentials is not self._identity.tls_credentials:
            self._line = self._new_line()
            self._old.add(before)
            self._close_unused(before)
        return self._line

    def _new_line(self) -> _Line:
        # Read before the channel is opened: after a renewal in between, the channel is only replaced once more.
        tls_credentials = self._identity.tls_credentials
        return _Line(self._open(), tls_credentials)

    def _ended(self, line: _Line) -> None:
        line.num_calls -= 1
        self._close_unused(line)

    def _close_unused(self, line: _Line) -> None:
        if line in self._old and not line.num_calls:
            self._old.remove(line)
            task = asyncio.ensure_future(line.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
