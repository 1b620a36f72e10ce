"""Limits of connections to the public endpoints; docs/SECURITY.md, section 3, shows them to operators."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from core.types.errors import DeployError
from core.wire.channel import renewable


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the gRPC endpoint."""

    header_bytes: int = 16 << 10  # names and values of one request, with its path
    open_s: float = 10.0  # for the TLS handshake and the HTTP/2 preface
    message_s: float = 60.0  # for the request message
    idle_s: float = 600.0  # without a call
    age_s: float = 3600.0  # the client must connect again after that time
    streams: int = 4096  # per connection


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of an HTTP endpoint."""

    header_bytes: int = 16 << 10  # path, query, names and values of one request
    headers: int = 100
    message_s: float = 60.0  # for the request body
    idle_s: int = 60  # between two requests on a connection
    connections: int = 16_384  # beyond this number, each new request is rejected with 503


GRPC_ENDPOINT = ConnectionLimits()
HTTP_ENDPOINT = HttpLimits()
ADMIN = HttpLimits(idle_s=30, connections=64)


logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int, int]


class Certificates:
    """Certificate and key of one endpoint. The files are checked on each new connection; a changed pair is used from
    then on. Thread-safe: gRPC checks on its own threads."""

    def __init__(self, certificate: str, key: str) -> None:
        """certificate: PEM chain, the endpoint's own certificate first. key: PEM private key. Raises DeployError."""
        self._certificate = Path(certificate)
        self._key = Path(key)
        self._seen = self._stamp()
        self._first = self._read()

    @classmethod
    def of(cls, certificate: str | None, key: str | None) -> Certificates | None:
        """Return None, meaning no TLS, unless both files are given."""
        return cls(certificate, key) if certificate and key else None

    def for_grpc(self) -> grpc.ServerCredentials:
        def reload() -> grpc.ServerCertificateConfiguration | None:
            pair = self._reload()
            return pair and pair.for_grpc()

        return renewable(self._first.for_grpc(), reload)

    def for_http(self) -> ssl.SSLContext:
        current = self._first.context

        def select(connection: ssl.SSLObject, *_: object) -> None:
            nonlocal current
            if pair := self._reload():
                current = pair.context
            connection.context = current

        first = current
        first.sni_callback = select  # also called for clients that send no server name
        return first

    def _reload(self) -> _Pair | None:
        """Return a new pair, or None if unchanged. A mismatched pair is skipped: it may be half written."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            pair = self._read()
        except DeployError as error:
            logger.warning("keeping the old certificate: %s", error)
            return None
        self._seen = stamp
        logger.info("certificate reloaded path=%s", self._certificate)
        return pair

    def _read(self) -> _Pair:
        """Read both files and check that they match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key)
            return _Pair(self._certificate.read_bytes(), self._key.read_bytes(), context)
        except (OSError, ssl.SSLError) as error:
            raise DeployError(f"router.tls_cert {self._certificate}, router.tls_key {self._key}: {error}") from None

    def _stamp(self) -> _Stamp:
        try:
            found = [path.stat() for path in (self._certificate, self._key)]
        except OSError as error:
            raise DeployError(f"router.tls_cert {self._certificate}, router.tls_key {self._key}: {error}") from None
        return found[0].st_mtime_ns, found[0].st_ino, found[1].st_mtime_ns, found[1].st_ino


class _Pair(NamedTuple):
    certificate: bytes
    key: bytes
    context: ssl.SSLContext  # of both

    def for_grpc(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)])
