"""How our own commands enter a door: their API key, the certificate that they expect, the model that they mean."""

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
from core.wire.channel import to_endpoints

_TLS = "grpcs://"


@dataclass(frozen=True, kw_only=True)
class EndpointAccess:
    """The key is never printed."""

    api_key: str | None = field(default=None, repr=False)
    # A PEM file of what is believed: over https:// beside what the system believes, over grpcs:// in its place.
    certificate: str | None = None
    is_tls: bool = False  # of the gRPC door; https:// says it of the other
    model: str = ""  # that is meant behind it; empty: whichever the door serves by itself

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call at the gRPC door."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @property
    def headers(self) -> dict[str, str]:
        """Of each request at the HTTP door."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def channel(self, endpoints: str) -> aio.Channel:
        """To HOST:PORT, or several with commas between them; grpcs:// in front asks for TLS."""
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
        """For https://. Raises SpecError."""
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
        """The target, the credentials where there is TLS, and the options of a channel."""
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
    """gRPC has no name to expect of several addresses: the certificate must be that of the first, among others."""
    first, *others = endpoints.removeprefix(_TLS).split(",")
    return [("grpc.ssl_target_name_override", first.rpartition(":")[0])] if others else []


def is_from_router(error: Any) -> bool:
    """Whether a router has ended this call of gRPC's with an error of its own; otherwise the way to it broke."""
    status = rpc_status.from_call(error)
    return status is not None and any(detail.Is(ErrorInfo.DESCRIPTOR) for detail in status.details)
