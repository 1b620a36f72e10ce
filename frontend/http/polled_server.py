"""A server of gRPC whose messages wake nobody: of grpc.aio's kind, for calls that send many small messages.

grpc.aio hands the end of each write from a thread of its own through a socket to the event loop, and a future to who
wrote: more than the write itself costs (docs/benchmarks/router.md). But a small message has been written when the call
that writes it returns. So here the loop looks itself: after what it has begun; each millisecond while somebody waits;
and at least each 50 while calls are under way. HTTP/2, TLS and limits are gRPC's core's, as ever.

That is of no public API of grpc's. `open_server` gives grpc.aio's own server for other versions than those known.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import grpc
from grpc import aio

from frontend.http.corks import CorkedConnection, Corks
from frontend.http.polled_call import PolledCall

try:
    from grpc._cython import cygrpc
except ImportError:
    cygrpc = None

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("1.85.",)  # versions of which the tests of the door have run with this
_PARTS = ("CompletionQueue", "CompletionType", "Server", "SendMessageOperation", "ReceiveCloseOnServerOperation")
_ASKED = 16  # calls at a time, so that a burst is taken while the loop is busy
_SOON_S = 0.001
LATER_S = 0.05
_AT_ONCE = 0  # a time that is past: who waits until then does not wait


def open_server(*, interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> aio.Server:
    """For the running event loop. Handlers after the interceptors are of streams both ways, whatever they are before;
    grpc.aio's own server takes these, too."""
    if grpc.__version__.startswith(KNOWN_VERSIONS) and all(hasattr(cygrpc, part) for part in _PARTS):
        return PolledServer(interceptors, options)
    logger.warning("grpc %s is not known here: a token costs more with grpc.aio", grpc.__version__)
    return aio.server(interceptors=interceptors, options=options)


class PolledServer(aio.Server):  # type: ignore[misc]  # gRPC's reflection takes nothing else
    """Belongs to the event loop in which it is started. What is not said here is as grpc.aio has it."""

    def __init__(self, interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        self._interceptors = tuple(interceptors)
        self._generic: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        self._server = cygrpc.Server(tuple(options), False)
        # New calls are told to a thread. One that heard of messages, too, would be woken by each that the loop is just
        # writing, and take the interpreter from it.
        self._arrivals = cygrpc.CompletionQueue()
        self._server.register_completion_queue(self._arrivals)
        self._queue = cygrpc.CompletionQueue()  # of calls
        self.corks = Corks()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_begun = 0  # whose end has not been seen
        self._num_awaited = 0  # of these
        self._will_look = False
        self._timer: asyncio.TimerHandle | None = None  # of the next look
        self._is_stopping = False
        self._has_stopped = asyncio.Event()
        self._has_ended = asyncio.Event()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._generic += generic_rpc_handlers

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: dict[str, grpc.RpcMethodHandler]
    ) -> None:
        self._methods |= {f"/{service_name}/{method}": handler for method, handler in method_handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        return self._bound(address, self._server.add_http2_port(address.encode()))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._bound(address, self._server.add_http2_port(address.encode(), server_credentials._credentials))

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server.start()
        for _ in range(_ASKED):
            self._ask()
        threading.Thread(target=self._wait, name="grpc-arrivals", daemon=True).start()

    async def stop(self, grace: float | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._server.shutdown(self._arrivals, lambda event: self._has_stopped.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(grace or 0):
                await self._has_stopped.wait()
        if not self._has_stopped.is_set():
            self._server.cancel_all_calls()
            await self._has_stopped.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._arrivals.shutdown()
        await self._has_ended.wait()
        self._server.destroy()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._has_ended.wait()
        return not self._has_ended.is_set()

    def begin(self, call: Any, operations: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        """Begin these operations of a call; `done` is called with their event."""
        self._look_soon()
        call.start_server_batch(operations, done)
        self._num_begun += 1

    def write(
        self, connection: CorkedConnection, call: Any, operations: tuple[Any, ...], done: Callable[[Any], None]
    ) -> None:
        """Begin operations that write a message; what this turn of the loop brings a connection leaves together."""
        if not self._will_look:
            self._look_soon()
        self.corks.writes(connection)
        call.start_server_batch(operations, done)
        self._num_begun += 1

    async def awaited(self, done: asyncio.Future[Any]) -> None:
        """Wait for what a `done` sets."""
        self._num_awaited += 1
        if self._num_awaited == 1:
            self._look_again()
        try:
            await done
        finally:
            self._num_awaited -= 1

    def _look_soon(self) -> None:
        """First of all: whatever comes of what is begun, no message is held back for longer."""
        if not self._will_look:
            self._will_look = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """At what has ended until now."""
        self._will_look = False
        self.corks.release()
        while (event := self._queue.poll(_AT_ONCE)).tag:
            self._num_begun -= 1
            event.tag(event)
        self._look_again()

    def _look_again(self) -> None:
        """In a while, if there is what may end. Where tokens come, their looks come before that: a wake costs more."""
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if self._num_begun:
            self._timer = self._loop.call_later(_SOON_S if self._num_awaited else LATER_S, self._look)

    def _ask(self) -> None:
        """For one more call."""
        self._server.request_call(self._queue, self._arrivals, self._came)

    def _wait(self) -> None:
        """On a thread of its own: for calls, and the end."""
        with suppress(RuntimeError):  # the loop has ended
            while (event := self._arrivals.poll()).tag:
                self._loop.call_soon_threadsafe(event.tag, event)
            self._loop.call_soon_threadsafe(self._has_ended.set)

    def _came(self, event: Any) -> None:
        if self._is_stopping or not event.success:
            return
        self._ask()
        task = self._loop.create_task(self._serve(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, event: Any) -> None:
        details = _Details(event.call_details.method.decode(errors="replace"), event.invocation_metadata)
        connection = self.corks.join(event.call.peer().decode())
        call = PolledCall(self, event.call, connection, details.invocation_metadata, event.call_details.deadline)
        call.follow(asyncio.current_task())
        try:
            find: Callable[[_Details], Awaitable[Any]] = self._find
            for interceptor in reversed(self._interceptors):
                find = partial(interceptor.intercept_service, find)
            if (handler := await find(details)) is None:
                await call.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            await call.serve(handler)
        except aio.AbortError:
            pass
        except asyncio.CancelledError:
            logger.debug("a call of %s was cancelled", details.method)
        except Exception as error:  # the edge of this task
            logger.exception("unexpected error in %s", details.method)
            with suppress(aio.AbortError):
                await call.abort(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            self.corks.leave(connection)

    async def _find(self, details: _Details) -> grpc.RpcMethodHandler | None:
        if handler := self._methods.get(details.method):
            return handler
        return next((found for generic in self._generic if (found := generic.service(details))), None)

    def _bound(self, address: str, port: int) -> int:
        if not port:
            raise RuntimeError(f"failed to bind to {address}")
        self.corks.listen(port)
        return port


class _Details(NamedTuple):
    """What interceptors see of a call."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]
