"""A partition between processes of this machine, on real sockets under the kernel's own rules."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.chaos import network
from cluster.errors import SpecError

_SILENCE_S = 0.3
_ANSWER_S = 20.0
_ECHO = """
import socket, sys, threading
def echo(connection):
    while data := connection.recv(64):
        connection.sendall(data)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def echo() -> Iterator[tuple[int, int]]:
    """A process that answers with what it is sent: its pid, and its port."""
    with subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def _answer(connection: socket.socket, *, within_s: float) -> bytes | None:
    connection.settimeout(within_s)
    try:
        return connection.recv(64)
    except TimeoutError:
        return None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to set rules of nftables")
def test_packets_vanish_between_the_parted_and_arrive_when_it_ends(echo: tuple[int, int]) -> None:
    pid, port = echo
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.sendall(b"before")
        assert _answer(ours, within_s=_ANSWER_S) == b"before"
        with network.partition({os.getpid()}, {pid}):
            ours.sendall(b"during")
            assert _answer(ours, within_s=_SILENCE_S) is None
        assert _answer(ours, within_s=_ANSWER_S) == b"during"  # sent again, as TCP does


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to set rules of nftables")
def test_who_is_not_parted_notices_nothing(echo: tuple[int, int]) -> None:
    pid, port = echo
    with socket.create_connection(("127.0.0.1", port)) as ours, network.partition({1}, {pid}):
        ours.sendall(b"still here")
        assert _answer(ours, within_s=_ANSWER_S) == b"still here"


def test_without_the_rights_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SpecError, match="run as root"), network.partition({1}, {2}):
        pass
