"""What one client, or a stranger, may hold of a door: the limits of both, side by side."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The limits of connections to one door. docs/SECURITY.md §3 shows them to operators."""

    header_bytes: int = 16 << 10  # names and values of one request, with its path
    headers: int = 100  # gRPC counts bytes alone
    open_s: float = 10.0  # for TLS, HTTP/2's first words, a request's header
    message_s: float = 60.0  # for what follows the header
    idle_s: float  # between two requests
    age_s: float = 3600.0  # then it ends with what is under way
    pipelined: int = 8  # requests that wait behind another; HTTP/1.1
    streams: int = 4096  # of one connection; HTTP/2
    connections: int = 16_384  # of one listener; of more, those end that have been idle longest. gRPC has no limit


GRPC_ENDPOINT = ConnectionLimits(idle_s=600.0)
HTTP_ENDPOINT = ConnectionLimits(idle_s=60.0)
ADMIN = ConnectionLimits(idle_s=30.0, connections=64)
