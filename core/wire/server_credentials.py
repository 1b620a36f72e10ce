"""What a gRPC server shows of itself in handshakes, renewed while others are under way.

gRPC (1.85) asks for a newer certificate at each handshake, under a lock; where it is told one, it frees what it had at
once. A handshake on another thread that has asked already, and now makes use of that without the lock, is then a
segmentation fault: with a new one for each, some hundred handshakes side by side ended a process, and any stranger can
begin those. So gRPC is told one only where there is one, and while it waits for that, under its lock, those that have
asked get time to go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

_GO_ON_S = 0.25  # they need a microsecond, and a turn on a core; threads of the server that shake hands wait as long


def renewable(
    first: grpc.ServerCertificateConfiguration,
    newer: Callable[[], grpc.ServerCertificateConfiguration | None],
    *,
    asks_clients: bool = False,
) -> grpc.ServerCredentials:
    """newer: called at each handshake, on a thread of gRPC's; None: as before. asks_clients: for a certificate."""

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        if found := newer():
            time.sleep(_GO_ON_S)
        return found

    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=asks_clients)
