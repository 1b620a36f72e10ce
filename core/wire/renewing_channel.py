"""A channel that is there for as long as its process, while the certificates that it shows come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpc import aio

from core.identity.credentials import Identity, TlsCredentials


@dataclass(eq=False)
class _Line:
    """One gRPC channel, and what it was opened with."""

    channel: aio.Channel
    tls_credentials: TlsCredentials | None
    num_calls: int = 0


class LastingChannel:
    """What generated stubs need of a channel: a call that begins after a renewal goes by a connection of the new
    certificate; those under way stay where they are, and the old connection ends with the last of them.

    `open` opens a gRPC channel with the present papers of `identity`. Lives on one event loop.
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
        """Calls under way are cancelled."""
        lines = [self._line, *self._old]
        await asyncio.gather(*(line.channel.close() for line in lines), *self._closing)

    def _calls(self, kind: str, method: tuple[Any, ...], codec: dict[str, Any]) -> Callable[..., Any]:
        """Makes each call on the line that is there by then."""

        def call(*args: Any, **kwargs: Any) -> Any:
            line = self._present()
            made = getattr(line.channel, kind)(*method, **codec)(*args, **kwargs)
            line.num_calls += 1
            made.add_done_callback(lambda _: self._ended(line))
            return made

        return call

    def _present(self) -> _Line:
        before = self._line
        if before.tls_credentials is not self._identity.tls_credentials:
            self._line = self._new_line()
            self._old.add(before)
            self._close_unused(before)
        return self._line

    def _new_line(self) -> _Line:
        tls_credentials = (
            self._identity.tls_credentials
        )  # before the channel: one that is renewed meanwhile is opened once more
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
