"""A call at a PolledServer: what its handler reads of it, and writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from grpc import aio

from frontend.http.corks import CorkedConnection

try:
    from grpc._cython import cygrpc
except ImportError:
    cygrpc = None

_NO_FLAGS = 0
_NO_DEADLINE = 1e15  # seconds; gRPC's word for "never" is more

_Metadata = Sequence[tuple[str, str | bytes]]


class _Server(Protocol):
    """Who begins operations of gRPC's core, and waits for them."""

    def write(
        self, connection: CorkedConnection, call: Any, operations: tuple[Any, ...], done: Callable[[Any], None]
    ) -> None: ...

    def begin(self, call: Any, operations: tuple[Any, ...], done: Callable[[Any], None]) -> None: ...

    async def awaited(self, done: asyncio.Future[Any]) -> None: ...


class PolledCall:
    """What grpc.aio.ServicerContext has, as far as the door's handlers use it. Belongs to the event loop."""

    def __init__(
        self, server: _Server, call: Any, connection: CorkedConnection, metadata: _Metadata, deadline: float
    ) -> None:
        """call: of gRPC's core. deadline: by the system's clock."""
        self._server = server
        self._call = call
        self._connection = connection
        self._metadata = metadata
        self._deadline = deadline
        self._trailing: _Metadata = ()
        self._deserialize: Callable[[bytes], Any] | None = None
        self._serialize: Callable[[Any], bytes] | None = None
        self._has_begun = False  # initial metadata are sent
        self._has_status = False
        self._is_sending = False
        self._waking: asyncio.Future[None] | None = None  # of who waits until something is sent
        self._reading: asyncio.Future[bytes | None] | None = None

    def follow(self, task: asyncio.Task[None] | None) -> None:
        """Cancel this task when the client has gone, or its deadline has passed."""
        assert task

        def closed(event: Any) -> None:
            if event.batch_operations[0].cancelled():
                task.cancel()

        self._begin((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), closed)

    async def serve(self, handler: grpc.RpcMethodHandler) -> None:
        """By a handler of a stream both ways, then say that it is done."""
        self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
        answering = handler.stream_stream(self, self)
        if hasattr(answering, "__aiter__"):
            async for message in answering:
                await self.write(message)
        else:
            await answering
        await self._end(grpc.StatusCode.OK, "", self._trailing)

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    def peer(self) -> str:
        return self._connection.peer

    def time_remaining(self) -> float | None:
        """None: it has no deadline."""
        return None if self._deadline > _NO_DEADLINE else max(0.0, self._deadline - time.time())

    def set_trailing_metadata(self, metadata: _Metadata) -> None:
        self._trailing = tuple(metadata)

    def __aiter__(self) -> PolledCall:
        return self

    async def __anext__(self) -> Any:
        """The client's next message."""
        if self._reading is None:
            reading = self._reading = asyncio.get_running_loop().create_future()

            def read(event: Any) -> None:
                if not reading.done():
                    reading.set_result(event.batch_operations[0].message())

            self._begin((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), read)
        await self._server.awaited(asyncio.shield(self._reading))
        message, self._reading = self._reading.result(), None
        if message is None:
            raise StopAsyncIteration
        return self._deserialize(message) if self._deserialize else message

    async def send_initial_metadata(self, metadata: _Metadata) -> None:
        self._check()
        assert not self._has_begun
        self._has_begun = True
        self._begin((cygrpc.SendInitialMetadataOperation(tuple(metadata), _NO_FLAGS),), _nothing)

    async def write(self, message: Any) -> None:
        """Returns when it is on its way and all before it have been taken over: from who reads slowly, one message
        waits in here, beside what gRPC's windows have."""
        if self._is_sending:
            await self._until_sent()
        self._check()
        operation = cygrpc.SendMessageOperation(self._serialize(message) if self._serialize else message, _NO_FLAGS)
        operations = (operation,) if self._has_begun else (*self._beginning(), operation)
        self._server.write(self._connection, self._call, operations, self._sent)
        self._is_sending = True

    def write_now(self, message: bytes) -> bool:
        """A message after the first, as it goes over the network; if none before it is still to be taken over."""
        if self._is_sending or self._has_status or not self._has_begun:
            return False
        operations = (cygrpc.SendMessageOperation(message, _NO_FLAGS),)
        self._server.write(self._connection, self._call, operations, self._sent)
        self._is_sending = True
        return True

    def _sent(self, event: Any) -> None:
        self._is_sending = False
        if self._waking and not self._waking.done():
            self._waking.set_result(None)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: _Metadata = ()) -> NoReturn:
        if not self._has_status:
            await self._end(code, details, trailing_metadata or self._trailing)
        raise aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def _end(self, code: grpc.StatusCode, details: str, trailing: _Metadata) -> None:
        if self._is_sending:
            await self._until_sent()
        self._check()
        self._has_status = True
        status = cygrpc.SendStatusFromServerOperation(tuple(trailing), code.value[0], details.encode(), _NO_FLAGS)
        self._begin((*self._beginning(), status), _nothing)

    def _beginning(self) -> tuple[Any, ...]:
        if self._has_begun:
            return ()
        self._has_begun = True
        return (cygrpc.SendInitialMetadataOperation((), _NO_FLAGS),)

    async def _until_sent(self) -> None:
        while self._is_sending:
            self._waking = asyncio.get_running_loop().create_future()
            await self._server.awaited(self._waking)

    def _begin(self, operations: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        self._server.begin(self._call, operations, done)

    def _check(self) -> None:
        if self._has_status:
            raise aio.UsageError("RPC already finished.")


def _nothing(event: Any) -> None:
    pass
