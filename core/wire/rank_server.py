"""Event loop of a rank's process, on its own thread, and its servers: gRPC and token frames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop
from grpc import aio

from core.identity.credentials import Identity
from core.types.errors import DeployError
from core.types.network import format_address
from core.wire.channel import listen, make_server
from core.wire.frames import FrameHub, FrameServer

T = TypeVar("T")

_OPEN_S = 30.0  # limit for opening a port


class RankHost:
    """Owner of the event loop. The loop never blocks on a device and the step thread never awaits; they communicate by
    `call_soon_threadsafe` and `StepLoop.post`."""

    def __init__(self, host: str, identity: Identity) -> None:
        """host: listening address. identity: of this process, for incoming and outgoing calls."""
        self.host = host
        self.identity = identity
        self.loop = uvloop.new_event_loop()
        self._server: aio.Server | None = None
        self._frame_servers: list[FrameServer] = []
        self._thread = threading.Thread(target=self._run, name="event-loop", daemon=True)
        self._thread.start()

    def serve(self, register: Callable[[aio.Server], None]) -> str:
        """Open a port and serve the servicers that `register` adds. Returns "host:port"."""
        return self.call(self._serve(register), timeout_s=_OPEN_S)

    def serve_frames(self, hub: FrameHub) -> str:
        """Open another port and serve the token frames of `hub` to routers. Returns "host:port"."""
        return self.call(self._serve_frames(hub), timeout_s=_OPEN_S)

    def call(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the event loop and wait for its result. Not callable from the event loop itself."""
        return self.spawn(coroutine).result(timeout_s)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback on the event loop. Thread-safe. Does nothing once the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server and end the loop."""
        self.call(self._stop(), timeout_s=timeout_s)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def _serve(self, register: Callable[[aio.Server], None]) -> str:
        self._server = make_server(self.identity)
        register(self._server)
        try:
            port = listen(self._server, format_address(self.host, 0), self.identity)
        except RuntimeError as error:
            raise DeployError(f"cannot listen on {self.host}: {error}") from error
        await self._server.start()
        return format_address(self.host, port)

    async def _serve_frames(self, hub: FrameHub) -> str:
        server = FrameServer(hub, self.identity)
        try:
            port = server.start(self.host)
        except OSError as error:
            raise DeployError(f"cannot listen on {self.host} for token frames: {error}") from error
        self._frame_servers.append(server)
        return format_address(self.host, port)

    async def _stop(self) -> None:
        for frames in self._frame_servers:
            await frames.close()
        if self._server:
            await self._server.stop(None)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
