"""TLS credentials for processes started by Ray, issued and renewed by the deployment's controller."""

from __future__ import annotations

from cluster.ray.controller_call import ask_controller
from core.identity.authority import KeyPair
from core.identity.credentials import Certificate, Identity, TlsCredentials
from core.identity.process_name import ProcessName
from core.identity.renewal import Renewal


def open_identity(name: ProcessName, *, tls: str) -> Identity:
    """Return this process's identity, renewed until it ends.

    `tls` is the spec's setting. Blocks. Raises ClusterError.
    """
    return open_tls_credentials(name, tls=tls).identity


def open_tls_credentials(name: ProcessName, *, tls: str) -> Renewal:
    """Like open_identity(), but return the renewal, so that a process that changes its name can stop it."""
    identity = Identity(name, None if tls == "off" else _obtain(name))
    renewal = Renewal(identity, lambda: _obtain(name))
    renewal.start()
    return renewal


def _obtain(name: ProcessName) -> TlsCredentials:
    """Request a certificate. The private key is created here and stays in this process."""
    keys = KeyPair()
    certificate: Certificate = ask_controller(name.deployment, "certify", name, keys.request)
    return keys.tls_credentials(certificate)
