"""TLS contexts for connections between a deployment's processes that do not use gRPC."""

from __future__ import annotations

import os
import ssl

from core.identity.credentials import TlsCredentials


def client_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a client context with these credentials that verifies the peer's certificate and host name.

    Raises OSError; ssl.SSLError is a subclass.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, tls_credentials)


def server_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a server context with these credentials that requires client certificates. Raises OSError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls_credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # no session resumption: each connection presents its certificate
    return context


def _context(protocol: int, tls_credentials: TlsCredentials) -> ssl.SSLContext:
    own = tls_credentials.certificate
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust each authority by itself, intermediates included
    context.load_verify_locations(cadata=own.authorities.decode())
    # Python loads a key only from a file. This one is in memory, and no other process can open it.
    file = os.memfd_create("credentials")
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(tls_credentials.key + b"\n" + own.chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
