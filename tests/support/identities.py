"""Process identities for tests: with certificates of a test authority, or in clear text."""

from __future__ import annotations

from core.identity.authority import LIFE_S, Authority, KeyPair
from core.identity.credentials import Identity, TlsCredentials
from core.identity.process_name import ProcessName

DEPLOYMENT = "cluster"


def rank(replica: str, number: int = 0, *, deployment: str = DEPLOYMENT) -> ProcessName:
    return ProcessName.of_rank(deployment, replica, number)


def router(name: str = "router-0", *, deployment: str = DEPLOYMENT) -> ProcessName:
    return ProcessName.of_router(deployment, name)


def in_clear(name: ProcessName) -> Identity:
    return Identity(name, None)


def tls_credentials(authority: Authority, name: ProcessName, *, life_s: float = LIFE_S) -> TlsCredentials:
    keys = KeyPair()
    return keys.tls_credentials(authority.issue(name, keys.request, life_s=life_s))


def proven(authority: Authority, name: ProcessName, *, life_s: float = LIFE_S) -> Identity:
    return Identity(name, tls_credentials(authority, name, life_s=life_s))
