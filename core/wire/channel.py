"""gRPC channels and servers between our own processes: limits, keepalive, and who is at either end.

A killed peer ends its streams in milliseconds. A silent one (stopped, partitioned) is found by keepalive within about
three seconds: all three of time, timeout and ping timeout must be set, or the last one's default of a minute governs.
Two seconds for the answer to a ping are not many: a process on an overloaded host has missed one of one second. Calls
that nobody retries, those of clients who know one door only, are given longer.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc import aio

from core.identity.credentials import Identity, TlsCredentials
from core.identity.process_name import ProcessName
from core.wire.authorization import Guard
from core.wire.renewing_channel import LastingChannel
from core.wire.server_credentials import renewable

MAX_MESSAGE_BYTES = 64 << 20  # a 1M-token prompt is 4 MB; no KV bytes travel here
PING_EVERY_S = 1.0  # while nothing comes of a peer, which then has two more seconds to say anything
_ANSWER_WITHIN_S = 2.0


def keepalive(*, ping_every_ms: int, answer_within_ms: int) -> list[tuple[str, Any]]:
    """All that finds a silent peer, for either side of a connection."""
    return [
        ("grpc.keepalive_time_ms", ping_every_ms),
        ("grpc.keepalive_timeout_ms", answer_within_ms),
        ("grpc.http2.ping_timeout_ms", answer_within_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


# Without these two a server answers its clients' keepalive with GOAWAY and kills a quiet stream after five seconds.
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
    ("grpc.enable_http_proxy", 0),  # whatever proxy the environment names: it is not for our own processes
]
_PEER_OPTIONS = [
    *_CHANNEL_OPTIONS,
    *keepalive(ping_every_ms=round(1e3 * PING_EVERY_S), answer_within_ms=round(1e3 * _ANSWER_WITHIN_S)),
]
CLIENT_OPTIONS = [*_CHANNEL_OPTIONS, *keepalive(ping_every_ms=10_000, answer_within_ms=20_000)]
# Of several doors, each call is at the next one of those that are open, and one that has fallen silent is none of them
# after two and a half seconds.
_ENDPOINT_OPTIONS = [
    *_CHANNEL_OPTIONS,
    *keepalive(ping_every_ms=500, answer_within_ms=2000),
    ("grpc.lb_policy_name", "round_robin"),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_PEER_OPTIONS,
    *PINGS_ALLOWED,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 20_000),  # so long one that connects waits, too; who says nothing is not kept
]


def to_endpoints(endpoints: str) -> tuple[str, list[tuple[str, Any]]]:
    """The target and the options of a client's channel to "host:port", or to several: "host:port,host:port"."""
    return (f"ipv4:{endpoints}", _ENDPOINT_OPTIONS) if "," in endpoints else (endpoints, CLIENT_OPTIONS)


def open_channel(address: str, *, peer: ProcessName, identity: Identity) -> aio.Channel:
    """A channel to another process of the deployment. Connects on first use, to `peer` and to nobody else who may be at
    `address`: by mutual TLS where `identity` has papers.

    It shows the papers of now for as long as it lives. A connection outlives them, but no new one can be made with
    papers that have ended: for calls that begin later, see `open_lasting_channel`.
    """
    if (tls_credentials := identity.tls_credentials) is None:
        return aio.insecure_channel(address, options=_PEER_OPTIONS)
    own = tls_credentials.certificate
    credentials = grpc.ssl_channel_credentials(own.authorities, tls_credentials.key, own.chain)
    options = [*_PEER_OPTIONS, ("grpc.ssl_target_name_override", peer.host)]
    return aio.secure_channel(address, credentials, options=options)


def open_lasting_channel(address: str, *, peer: ProcessName, identity: Identity) -> LastingChannel:
    """The same for as long as this process lives: it takes up renewed papers, and breaks no call for that."""
    return LastingChannel(lambda: open_channel(address, peer=peer, identity=identity), identity)


def make_server(identity: Identity) -> aio.Server:
    """A server of this process, to which servicers are added, and then `listen`.

    Where `identity` has papers, each call is allowed by core.identity.rules, or refused.
    """
    guards = [Guard(identity.name)] if identity.tls_credentials else []
    return aio.server(options=_SERVER_OPTIONS, interceptors=guards)


def listen(server: aio.Server, address: str, identity: Identity) -> int:
    """Open a port, by mutual TLS where `identity` has papers; returns its number. Raises RuntimeError.

    Renewed papers are shown from the next handshake on.
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
