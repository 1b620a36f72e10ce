"""What a process shows, and whom it trusts, where it connects by Python's own TLS and not by gRPC's."""

from __future__ import annotations

import os
import ssl

from core.identity.credentials import TlsCredentials


def client_context(tls_credentials: TlsCredentials) -> ssl.SSLContext:
    """For connections to other processes of the deployment, over HTTP/2: as a channel of gRPC's with these papers."""
    own = tls_credentials.certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the name, and asks for a certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # each of the authorities is trusted by itself
    context.load_verify_locations(cadata=own.authorities.decode())
    context.set_alpn_protocols(["h2"])
    # Python reads a key from a file alone; this one is in memory, and nobody else's.
    file = os.memfd_create("papers")
    try:
        with open(file, "wb", closefd=False) as written:
            written.write(tls_credentials.key + b"\n" + own.chain)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
