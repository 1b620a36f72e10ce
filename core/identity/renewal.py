"""New papers before the present ones end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from core.identity.credentials import Identity, TlsCredentials

logger = logging.getLogger(__name__)

_AT = 1 / 3  # of a certificate's life: it still holds for as long again and again while nobody renews it
_RETRY_S = 60.0


class Renewal:
    """Renews one identity on a thread of its own, for as long as the process lives, or until `stop`.

    `obtain` asks for a certificate of a new key; whatever it raises is logged, and it is asked again.
    """

    def __init__(self, identity: Identity, obtain: Callable[[], TlsCredentials], *, retry_s: float = _RETRY_S) -> None:
        self.identity = identity
        self._obtain = obtain
        self._retry_s = retry_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="renewal", daemon=True)

    def start(self) -> None:
        """There is nothing to renew without TLS."""
        if self.identity.tls_credentials:
            self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self.identity.tls_credentials
        pause_s = self.identity.tls_credentials.certificate.life_s * _AT
        while not self._stopped.wait(pause_s):
            try:
                tls_credentials = self._obtain()
            except Exception as error:  # the edge of this thread: it must never end while the process lives
                logger.warning("the certificate of %s is not renewed yet: %s", self.identity.name, error)
                pause_s = self._retry_s
            else:
                self.identity.renew(tls_credentials)
                pause_s = tls_credentials.certificate.life_s * _AT
                logger.info("the certificate of %s is renewed, for %.0f s", self.identity.name, pause_s / _AT)
