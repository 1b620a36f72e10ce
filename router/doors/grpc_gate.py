"""Who may speak at the gRPC door: for every method but those of health, an API key that is known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from cluster.words.errors import ClusterError
from router.access.access import Access
from router.doors.grpc_errors import status_of

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC takes nothing else
    """Refuses a call before anything of its messages is read. Whom it is from, the handler asks itself."""

    def __init__(self, access: Access, *, free: Iterable[str]) -> None:
        """free: full names of the services for which nobody needs a key."""
        self._access = access
        self._free = tuple(f"/{service}/" for service in free)

    async def intercept_service(self, continuation: Continuation, call: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(call)
        if handler is None or call.method.startswith(self._free):
            return handler
        try:
            self._access.identify(authorization_of(call.invocation_metadata))
        except ClusterError as error:
            return _refusing(handler, error)
        return handler


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """What the client has sent as `authorization`."""
    return next((str(value) for key, value in metadata or () if key == "authorization"), None)


def _refusing(handler: Any, error: ClusterError) -> Any:
    """A handler of the same kind as `handler` that only says why."""

    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))
        raise AssertionError("abort returned")

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[handler.request_streaming, handler.response_streaming](refuse)
