"""Who a process is, and what it shows others as proof."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.identity.process_name import ProcessName


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What an authority answers: nothing in it is secret. PEM."""

    chain: bytes  # the process's own certificate first, then those between it and `authorities`
    authorities: bytes  # whose certificates are to be accepted
    life_s: float  # from when it was issued


@dataclass(frozen=True, kw_only=True)
class TlsCredentials:
    """A certificate together with its private key, which has never left this process. PEM."""

    certificate: Certificate
    key: bytes = field(repr=False)


class Identity:
    """The name of this process and its present papers; None where the deployment has `security.tls: off`.

    One thread renews; servers and channels read from any other, at each handshake and at each new call.
    """

    def __init__(self, name: ProcessName, tls_credentials: TlsCredentials | None) -> None:
        self.name = name
        self._tls_credentials = tls_credentials

    @property
    def tls_credentials(self) -> TlsCredentials | None:
        return self._tls_credentials

    def renew(self, tls_credentials: TlsCredentials) -> None:
        """From now on these are shown. A deployment without TLS stays so."""
        assert self._tls_credentials, f"{self.name} has no papers that could be renewed"
        self._tls_credentials = tls_credentials

    def rank(self, replica: str, rank: int) -> ProcessName:
        """A rank of the same deployment."""
        return ProcessName.of_rank(self.name.deployment, replica, rank)
