"""Renewable TLS credentials of a gRPC server, safe against concurrent handshakes.

gRPC (1.85) asks for a newer certificate at each handshake, under a lock, and frees the old one at once. A handshake on
another thread that has read the old one and uses it without the lock then crashes the process. A new certificate per
handshake crashed it after some hundred concurrent handshakes, which any client can start. So this module returns a
certificate only when there is a new one, and sleeps before under gRPC's lock, so that running handshakes can finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

_GO_ON_S = 0.25  # running handshakes need a microsecond and a time slice; the server's handshakes pause as long


def renewable(
    first: grpc.ServerCertificateConfiguration,
    newer: Callable[[], grpc.ServerCertificateConfiguration | None],
    *,
    asks_clients: bool = False,
) -> grpc.ServerCredentials:
    """newer: called at each handshake, on a gRPC thread; returns None if unchanged. asks_clients: mutual TLS."""

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        if found := newer():
            time.sleep(_GO_ON_S)
        return found

    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=asks_clients)
