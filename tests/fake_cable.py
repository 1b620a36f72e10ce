"""A cable between clients of a server on this machine and that server, which can be pulled out, or fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE_BYTES = 1 << 16


class FakeCable:
    """Clients connect to `port` of loopback."""

    def __init__(self, to_port: int) -> None:
        self.port = 0
        self._to_port = to_port
        self._carries = asyncio.Event()
        self._carries.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    def fall_silent(self) -> None:
        """Nobody is told."""
        self._carries.clear()

    def pull_out(self) -> None:
        """Both sides are told."""
        for writer in self._writers:
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        self.pull_out()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

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
    server = await asyncio.start_server(cable.connected, "127.0.0.1", 0)
    cable.port = server.sockets[0].getsockname()[1]
    try:
        yield cable
    finally:
        server.close()
        await cable.close()
