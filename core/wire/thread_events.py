"""Events from a thread to the gRPC call that waits for them."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from core.types.errors import ClusterError

E = TypeVar("E")


class CallEvents(Generic[E]):
    """Queue from any thread to a call. The call creates and iterates it on its event loop; `put` and `end` are
    thread-safe."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[E | ClusterError | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: E) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def end(self, error: ClusterError | None = None) -> None:
        """End the iteration; it raises the error if there is one."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, error)

    def __aiter__(self) -> CallEvents[E]:
        return self

    async def __anext__(self) -> E:
        event = await self._events.get()
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, ClusterError):
            raise event
        return event
