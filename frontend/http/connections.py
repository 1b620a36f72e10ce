"""Limits of connections to the public endpoints; docs/SECURITY.md, section 3, shows them to operators."""

from __future__ import annotations

from dataclasses import dataclass


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
