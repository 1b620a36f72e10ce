"""Client access to the API endpoints for our own commands: API key, trusted certificate and model."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from grpc_status import rpc_status

from core.types.errors import SpecError
from core.types.network import split_address
from core.wire.channel import to_endpoints

_TLS = "grpcs://"


@dataclass(frozen=True, kw_only=True)
class EndpointAccess:
    """Access settings of a client. The key is hidden from repr."""

    api_key: str | None = field(default=None, repr=False)
    # PEM file of trusted certificates: in addition to the system's for https://, instead of them for grpcs://.
    certificate: str | None = None
    is_tls: bool = False  # gRPC endpoint; for HTTP the URL scheme decides
    model: str = ""  # requested model; empty: the endpoint's default

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each gRPC call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each HTTP request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def channel(self, endpoints: str) -> aio.Channel:
        """Open a channel to HOST:PORT, or several separated by commas. The prefix grpcs:// requires TLS."""
        target, credentials, options = self._way_to(endpoints)
        if credentials is None:
            return aio.insecure_channel(target, options=options)
        return aio.secure_channel(target, credentials, options=options)

    def blocking_channel(self, endpoints: str) -> grpc.Channel:
        target, credentials, options = self._way_to(endpoints)
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    def ssl_context(self) -> ssl.SSLContext:
        """Return the context for https://. Raises SpecError."""
        context = ssl.create_default_context()
        if self.certificate:
            try:
                context.load_verify_locations(self.certificate)
            except (OSError, ssl.SSLError) as error:
                raise SpecError(f"{self.certificate}: {error}") from None
        return context

    def _needs_tls(self, endpoints: str) -> bool:
        return self.is_tls or endpoints.startswith(_TLS)

    def _way_to(self, endpoints: str) -> tuple[str, grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
        """Return a channel's target, credentials (None without TLS) and options."""
        target, options = to_endpoints(endpoints.removeprefix(_TLS))
        if not self._needs_tls(endpoints):
            return target, None, options
        return target, self._credentials(), [*options, *_name_of(endpoints)]

    def _credentials(self) -> grpc.ChannelCredentials:
        try:
            roots = Path(self.certificate).read_bytes() if self.certificate else None
        except OSError as error:
            raise SpecError(f"{self.certificate}: {error.strerror}") from None
        return grpc.ssl_channel_credentials(roots)


def _name_of(endpoints: str) -> list[tuple[str, str]]:
    """Return the expected server name for several addresses, for which gRPC has no default: the first address's host
    name. Every endpoint's certificate must contain it."""
    first, *others = endpoints.removeprefix(_TLS).split(",")
    return [("grpc.ssl_target_name_override", split_address(first)[0])] if others else []


def is_from_router(error: Any) -> bool:
    """Return True if a router ended this gRPC call with an error, False if the connection failed."""
    status = rpc_status.from_call(error)
    return status is not None and any(detail.Is(ErrorInfo.DESCRIPTOR) for detail in status.details)
