"""Concurrent handshakes do not crash the server."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

_AT_A_TIME = 32
_CONNECTIONS = 3000  # some hundred crashed it


def test_concurrent_aborted_handshakes_do_not_crash_the_server() -> None:
    """At a rank's port, where a connection starts a handshake."""
    command = [sys.executable, "-m", "tests.core.wire.shaking_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdin and server.stdout
        port = int(server.stdout.readline())
        with ThreadPoolExecutor(_AT_A_TIME) as threads:
            assert all(threads.map(_connect, repeat(port, _CONNECTIONS)))
        server.stdin.close()
        assert server.wait() == 0


def _connect(port: int) -> bool:
    """Connect and disconnect. Returns False if the connection was refused."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True
