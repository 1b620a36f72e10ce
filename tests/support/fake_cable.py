"""Proxy between clients and a server on this machine that can disconnect or drop all data silently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE_BYTES = 1 << 16


class FakeCable:
    """Proxy for clients that connect to `port` on loopback."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._carries = asyncio.Event()
        self._carries.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def fall_silent(self) -> None:
        """Drop all data without closing the connections."""
        self._carries.clear()

    def pull_out(self) -> None:
        """Close all connections and stop listening."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self.pull_out()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self.pull_out()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():  # accepted while the cable was pulled out
            writer.transport.abort()
            return
        self._writers.append(writer)
        connection = asyncio.create_task(self._carry(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers.append(far_writer)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await source.read(_PIECE_BYTES):
                await self._carries.wait()
                target.write(piece)
                await target.drain()
        target.close()


@asynccontextmanager
async def fake_cable(port: int) -> AsyncIterator[FakeCable]:
    cable = FakeCable(port)
    await cable.open()
    try:
        yield cable
    finally:
        await cable.close()
