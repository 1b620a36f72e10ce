"""Who may speak at the gRPC door, and for how long: for every method but those of health, an API key that is known.

gRPC reads the message of a call that has only one before its handler is called, for as long as it takes to come. So
those calls are served here as streams, of which a handler reads when it likes: who is refused is refused unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_status import rpc_status

from cluster.words.errors import ClusterError
from router.access.access import Access
from router.doors.grpc_errors import status_of

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]

_FREE_S = 10.0  # for the message of who needs no key
_NOW = 0.0  # of the loop's clock
_MAX_FREE = 16  # such messages at a time, each of MAX_REQUEST_BYTES at most


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC takes nothing else
    """Refuses a call before anything of its messages is read. Whom it is from, the handler asks itself."""

    def __init__(self, access: Access, *, free: Iterable[str], within_s: float) -> None:
        """free: full names of the services for which nobody needs a key. within_s: how long the one message of a call
        may take; of a free one, 10 s at most, and where 16 of these are on their way, the newest ends the oldest."""
        self._access = access
        self._free = tuple(f"/{service}/" for service in free)
        self._messages = _Messages(within_s)
        self._free_messages = _Messages(min(within_s, _FREE_S), at_a_time=_MAX_FREE)

    async def intercept_service(self, continuation: Continuation, call: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(call)
        if handler is None:
            return None
        if call.method.startswith(self._free):
            return _streamed(handler, self._free_messages)
        try:
            self._access.identify(authorization_of(call.invocation_metadata))
        except ClusterError as error:
            return _refusing(error)
        return _streamed(handler, self._messages)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """What the client has sent as `authorization`."""
    return next((str(value) for key, value in metadata or () if key == "authorization"), None)


class _Messages:
    """Those that are on their way, each to the call that it begins."""

    def __init__(self, within_s: float, at_a_time: int | None = None) -> None:
        self._within_s = within_s
        self._at_a_time = at_a_time
        self._scopes: dict[asyncio.Timeout, None] = {}  # the oldest first

    async def first(self, requests: Any, context: _Context) -> Any:
        """Ends the call, where it does not come."""
        try:
            async with asyncio.timeout(self._within_s) as scope:
                self._scopes[scope] = None
                if self._at_a_time is not None and len(self._scopes) > self._at_a_time:
                    oldest = next(iter(self._scopes))
                    del self._scopes[oldest]
                    if not oldest.expired():
                        oldest.reschedule(_NOW)
                try:
                    return await anext(aiter(requests))
                finally:
                    self._scopes.pop(scope, None)
        except TimeoutError:
            if scope.when() == _NOW:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls wait for their request")
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive in time")
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no request in this call")


def _streamed(handler: Any, messages: _Messages) -> Any:
    """The same handler, for whose one message is waited here."""
    if handler.request_streaming:
        return handler

    async def answer(requests: Any, context: _Context) -> None:
        message = await messages.first(requests, context)
        if handler.response_streaming:
            await handler.unary_stream(message, context)
        else:
            await context.write(await handler.unary_unary(message, context))

    return grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _refusing(error: ClusterError) -> Any:
    """A handler that only says why, and reads nothing."""

    async def refuse(requests: object, context: _Context) -> NoReturn:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))
        raise AssertionError("abort returned")

    return grpc.stream_stream_rpc_method_handler(refuse)
