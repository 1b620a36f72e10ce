"""Identity of a process, and the TLS credentials that prove it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.identity.process_name import ProcessName


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Issued certificate. Public. PEM."""

    chain: bytes  # the process's own certificate, then the intermediates
    authorities: bytes  # trusted roots
    life_s: float  # from its issue


@dataclass(frozen=True, kw_only=True)
class TlsCredentials:
    """Certificate with its private key, which never leaves this process. PEM."""

    certificate: Certificate
    key: bytes = field(repr=False)


class Identity:
    """Name and current credentials of this process; credentials are None with `security.tls: off`.

    One thread renews. Servers and channels read from any thread, at each handshake and each new call.
    """

    def __init__(self, name: ProcessName, tls_credentials: TlsCredentials | None) -> None:
        self.name = name
        self._tls_credentials = tls_credentials

    @property
    def tls_credentials(self) -> TlsCredentials | None:
        return self._tls_credentials

    def renew(self, tls_credentials: TlsCredentials) -> None:
        """Replace the credentials. A deployment without TLS never calls this."""
        assert self._tls_credentials, f"{self.name} has no credentials that could be renewed"
        self._tls_credentials = tls_credentials

    def rank(self, replica: str, rank: int) -> ProcessName:
        """Return the name of a rank of the same deployment."""
        return ProcessName.of_rank(self.name.deployment, replica, rank)
