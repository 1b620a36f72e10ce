"""gRPC channel that lives as long as its process and changes its certificate when it is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from core.identity.credentials import Identity, TlsCredentials


@dataclass(eq=False)
class _Line:
    """One gRPC channel and the credentials that it was opened with."""

    channel: aio.Channel
    tls_credentials: TlsCredentials | None
    num_calls: int = 0


class LastingChannel:
    """Channel for generated stubs. Calls that start after a renewal use a connection with the new certificate; running
    calls stay on the old connection, which is closed after the last of them.

    `open` opens a gRPC channel with the current credentials of `identity`. Lives on one event loop.
    """

    def __init__(self, open: Callable[[], aio.Channel], identity: Identity) -> None:
        self._open = open
        self._identity = identity
        self._line = self._new_line()
        self._old: set[_Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("unary_unary", method, codec)

    def unary_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("unary_stream", method, codec)

    def stream_stream(self, *method: Any, **codec: Any) -> Callable[..., Any]:
        return self._calls("stream_stream", method, codec)

    async def close(self) -> None:
        """Close all connections. Running calls are cancelled."""
        lines = [self._line, *self._old]
        await asyncio.gather(*(line.channel.close() for line in lines), *self._closing)

    def _calls(self, kind: str, method: tuple[Any, ...], codec: dict[str, Any]) -> Callable[..., Any]:
        """Return a callable that starts each call on the connection of that moment."""

        def call(*args: Any, **kwargs: Any) -> Any:
            line = self._present()
            running = getattr(line.channel, kind)(*method, **codec)(*args, **kwargs)
            line.num_calls += 1
            running.add_done_callback(lambda _: self._ended(line))
            return running

        return call

    def _present(self) -> _Line:
        before = self._line
        if before.tls_credentials is not self._identity.tls_credentials:
            self._line = self._new_line()
            self._old.add(before)
            self._close_unused(before)
        return self._line

    def _new_line(self) -> _Line:
        # Read before the channel is opened: after a renewal in between, the channel is only replaced once more.
        tls_credentials = self._identity.tls_credentials
        return _Line(self._open(), tls_credentials)

    def _ended(self, line: _Line) -> None:
        line.num_calls -= 1
        self._close_unused(line)

    def _close_unused(self, line: _Line) -> None:
        if line in self._old and not line.num_calls:
            self._old.remove(line)
            task = asyncio.ensure_future(line.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
