"""Identity of a process, the TLS credentials that prove it, and their renewal before they expire."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from core.identity.process_name import ProcessName

logger = logging.getLogger(__name__)

_RENEW_AT = 1 / 3  # of a certificate's lifetime: two thirds remain for retries
_RETRY_S = 60.0


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


@dataclass(eq=False)
class Identity:
    """Name and current credentials of this process; credentials are None with `security.tls: off`.

    One thread renews. Servers and channels read from any thread, at each handshake and each new call.
    """

    name: ProcessName
    tls_credentials: TlsCredentials | None

    def renew(self, tls_credentials: TlsCredentials) -> None:
        """Replace the credentials. A deployment without TLS never calls this."""
        assert self.tls_credentials, f"{self.name} has no credentials that could be renewed"
        self.tls_credentials = tls_credentials

    def rank(self, replica: str, rank: int) -> ProcessName:
        return ProcessName.of_rank(self.name.deployment, replica, rank)


class Renewal:
    """Thread that renews one identity until `stop`.

    `obtain` requests a certificate for a new key. Its errors are logged and retried after `retry_s`. Certificates
    expire by the wall clock: after a clock change or a host's sleep, a renewal that is due starts within `retry_s`.
    """

    def __init__(self, identity: Identity, obtain: Callable[[], TlsCredentials], *, retry_s: float = _RETRY_S) -> None:
        self.identity = identity
        self._obtain = obtain
        self._retry_s = retry_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)

    def start(self) -> None:
        """Start the thread. Without TLS there is nothing to renew."""
        if self.identity.tls_credentials:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self.identity.tls_credentials
        certificate, obtained_at = self.identity.tls_credentials.certificate, time.time()
        while not self._stopped.wait(min(self._retry_s, certificate.life_s * _RENEW_AT)):
            if -self._retry_s < time.time() - obtained_at < certificate.life_s * _RENEW_AT:
                continue
            try:
                tls_credentials = self._obtain()
            except Exception as error:  # the thread must live as long as the process
                logger.warning("failed to renew the certificate of %s, retrying: %s", self.identity.name, error)
            else:
                self.identity.renew(tls_credentials)
                certificate, obtained_at = tls_credentials.certificate, time.time()
                logger.info("renewed the certificate of %s valid_s=%.0f", self.identity.name, certificate.life_s)
