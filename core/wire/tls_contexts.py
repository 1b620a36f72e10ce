"""TLS contexts for connections between processes of a deployment that do not go through gRPC."""

from __future__ import annotations

import os
import ssl

from core.identity.credentials import TlsCredentials


def client_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a context that shows these papers, and checks the peer's certificate and host name.

    Raises OSError; ssl.SSLError is a subclass.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, tls_credentials)


def server_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """Return a context that shows these papers, and asks clients for a certificate. Raises OSError."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls_credentials)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # each connection shows its certificate
    return context


def _context(protocol: int, tls_credentials: TlsCredentials) -> ssl.SSLContext:
    own = tls_credentials.certificate
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # each of the authorities is trusted by itself
    context.load_verify_locations(cadata=own.authorities.decode())
    # Python reads a key from a file alone. This one stays in memory, and no other process can open it.
    file = os.memfd_create("papers")
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(tls_credentials.key + b"\n" + own.chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
