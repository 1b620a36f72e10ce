"""How a process that Ray has started comes by its papers: from the deployment's controller, again and again."""

from __future__ import annotations

from cluster.ray.controller_call import ask_controller
from core.identity.credentials import Certificate, Identity, TlsCredentials
from core.identity.key_pair import KeyPair
from core.identity.process_name import ProcessName
from core.identity.renewal import Renewal


def open_identity(name: ProcessName, *, tls: str) -> Identity:
    """Of this process, renewed for as long as it lives; `tls` as in the spec. Blocks. Raises ClusterError."""
    return open_tls_credentials(name, tls=tls).identity


def open_tls_credentials(name: ProcessName, *, tls: str) -> Renewal:
    """The same, for a process that may take another name: then it stops the renewal of this one."""
    identity = Identity(name, None if tls == "off" else _obtain(name))
    renewal = Renewal(identity, lambda: _obtain(name))
    renewal.start()
    return renewal


def _obtain(name: ProcessName) -> TlsCredentials:
    """The key is made here, and stays here."""
    keys = KeyPair()
    certificate: Certificate = ask_controller(name.deployment, "certify", name, keys.request)
    return keys.tls_credentials(certificate)
