"""Admission of gRPC calls: API keys, and limits on messages being received.

For a unary request, gRPC receives the message before it calls the handler, however long that takes. These calls are
therefore served as streams, from which the handler reads when it chooses: a rejected call is not read at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from core.types.errors import CapacityError, ClusterError, DeadlineExceeded, RequestError
from frontend.access.access import Access
from frontend.grpc.messages import status_of

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
_Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Entered: TypeAlias = Callable[[_Context], AbstractAsyncContextManager[Any]]

_NOW = 0.0  # a deadline in the past, on the loop's clock
_FREE_S = 10.0  # time limit of a message for which no key is needed
_SPARED_FREE_S = 0.005  # enough to read a message that has already arrived
_SPARED = 1 / 12  # share of its time limit that a message with a key gets before others may displace it
# Messages being received at a time, each of MAX_REQUEST_BYTES at most; a quick one takes only a moment. Messages of
# free calls are tiny, but gRPC's size limit holds for the whole server, so their number is small.
_MAX_FREE = 4
_MAX_OF_ALL = 32
_MAX_OF_KEY = 12


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # gRPC takes nothing else
    """Rejects a call before any of its messages is read. The handler identifies the client again by itself."""

    def __init__(
        self,
        access: Access,
        *,
        free: Iterable[str],
        within_s: float,
        max_waiting: int,
        entered: Mapping[str, Entered] | None = None,
    ) -> None:
        """free: full names of services that need no key. within_s: time limit of a message, at most 10 s for a free
        call. max_waiting: calls of one key that may wait for their turn to be read. entered: by method, context
        manager that is entered before the message is read and left at the end of the call."""
        self._access = access
        self._max_waiting = max_waiting
        self._free = tuple(f"/{service}/" for service in free)
        self._within_s = within_s
        self._entered = entered or {}
        self._of_free = _Room(_MAX_FREE, max_waiting, spared_s=_SPARED_FREE_S)
        self._of_all = _Room(_MAX_OF_ALL, max_waiting, spared_s=_SPARED * within_s)
        self._of_keys: WeakValueDictionary[str, _Room] = WeakValueDictionary()

    async def intercept_service(self, continuation: Continuation, call: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(call)
        if handler is None:
            return None
        decode = handler.request_deserializer
        if call.method.startswith(self._free):
            return _streamed(handler, _Messages(min(self._within_s, _FREE_S), [self._of_free], decode))
        try:
            client = self._access.identify(authorization_of(call.invocation_metadata))
        except ClusterError as error:
            return _rejecting(error)
        rooms = [self._room_of(client.key.id), self._of_all] if client.key else [self._of_all]
        return _streamed(handler, _Messages(self._within_s, rooms, decode), self._entered.get(call.method, nullcontext))

    def _room_of(self, key_id: str) -> _Room:
        room = self._of_keys.get(key_id) or _Room(_MAX_OF_KEY, self._max_waiting, spared_s=_SPARED * self._within_s)
        self._of_keys[key_id] = room
        return room


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    return next((str(value) for key, value in metadata or () if key == "authorization"), None)


@dataclass(eq=False)
class _Reading:
    """Message being received, or waiting for its turn."""

    scope: asyncio.Timeout
    began_at: float
    is_ended: bool = False  # displaced by others

    def end(self, at: float) -> None:
        self.is_ended = True
        until = self.scope.when()
        if not self.scope.expired() and (until is None or at < until):
            self.scope.reschedule(at)


class _Room:
    """Limits the messages received at a time. Further ones wait; beyond `max_waiting`, the next one is rejected.

    For each waiting message, the oldest one being received is ended once it has had `spared_s`, so slow uploads cannot
    starve others.
    """

    def __init__(self, at_a_time: int, max_waiting: int, *, spared_s: float) -> None:
        self._free = asyncio.Semaphore(at_a_time)
        self._max_waiting = max_waiting
        self._spared_s = spared_s
        self._num_waiting = 0
        self._spared: dict[_Reading, None] = {}  # not ending; the oldest first
        self._ending: set[_Reading] = set()

    @asynccontextmanager
    async def taken(self, reading: _Reading) -> AsyncIterator[None]:
        self._num_waiting += 1
        if self._num_waiting > self._max_waiting:
            reading.end(_NOW)
        self._end_some()
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        reading.began_at = asyncio.get_running_loop().time()
        self._spared[reading] = None
        self._end_some()
        try:
            yield
        finally:
            self._spared.pop(reading, None)
            self._ending.discard(reading)
            self._free.release()

    def _end_some(self) -> None:
        """End as many of the oldest messages as others wait."""
        while self._free.locked() and self._spared and len(self._ending) < self._num_waiting:
            oldest = next(iter(self._spared))
            del self._spared[oldest]
            self._ending.add(oldest)
            oldest.end(oldest.began_at + self._spared_s)


@dataclass(frozen=True)
class _Messages:
    """Messages of one call, usually one. Each has a time limit, and takes a place in each room while it is received."""

    within_s: float
    rooms: Sequence[_Room]  # entered in order
    decode: Callable[[bytes], Any]  # raises DecodeError

    async def one(self, requests: Any, context: _Context) -> Any:
        """Return the call's message. Aborts the call if there is none."""
        if (message := await self._next(requests, context)) is None:
            await _abort(context, RequestError("the call has no request message"))
        return message

    async def each(self, requests: Any, context: _Context) -> AsyncIterator[Any]:
        while (message := await self._next(requests, context)) is not None:
            yield message

    async def _next(self, requests: Any, context: _Context) -> Any:
        """Return the next message, or None at the end. Aborts the call if it is invalid, or not here in time."""
        try:
            async with asyncio.timeout(self.within_s) as scope, AsyncExitStack() as stack:
                reading = _Reading(scope, 0.0)
                for room in self.rooms:
                    await stack.enter_async_context(room.taken(reading))
                received = await anext(aiter(requests), None)
            return received if received is None else self.decode(received)
        except DecodeError as error:  # gRPC itself would report UNKNOWN
            await _abort(context, RequestError(f"the request message is not valid protobuf of its type: {error}"))
        except TimeoutError:
            if reading.is_ended:
                await _abort(context, CapacityError("too many calls are sending their request; retry"))
            await _abort(context, DeadlineExceeded("the request did not arrive in time"))


def _streamed(handler: Any, messages: _Messages, entered: Entered = nullcontext) -> Any:
    """Wrap a handler as a stream whose messages are received here. It may also write responses as serialized bytes."""

    def serialize(response: Any) -> bytes:
        return response if isinstance(response, bytes) else handler.response_serializer(response)

    async def answer_all(requests: Any, context: _Context) -> AsyncIterator[Any]:
        async for response in handler.stream_stream(messages.each(requests, context), context):
            yield response

    async def answer(requests: Any, context: _Context) -> None:
        async with entered(context):
            request = await messages.one(requests, context)
            if handler.response_streaming:
                await handler.unary_stream(request, context)
            else:
                await context.write(await handler.unary_unary(request, context))

    return grpc.stream_stream_rpc_method_handler(
        answer_all if handler.request_streaming else answer,
        response_serializer=serialize,
    )


def _rejecting(error: ClusterError) -> Any:
    """Return a handler that rejects the call without reading it."""

    async def reject(requests: object, context: _Context) -> NoReturn:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(reject)


async def _abort(context: _Context, error: ClusterError) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort returned")
