"""Partition between processes of this machine, with real sockets and nftables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from benchmarks.chaos import network
from core.types.errors import SpecError

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


@contextmanager
def _echo() -> Iterator[tuple[int, socket.socket]]:
    """Start a process that echoes; yields its pid and a connection to it."""
    with subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as connection:
                yield process.pid, connection
        finally:
            process.kill()


@contextmanager
def _parted(some: set[int], others: set[int]) -> Iterator[None]:
    """Partition two groups like chaos: on a thread next to an event loop."""
    ended = threading.Event()
    with ThreadPoolExecutor() as pool:
        parting = pool.submit(network.partition, some, others, ended=ended, within_s=_ANSWER_S)
        try:
            yield
        finally:
            ended.set()
        parting.result()


def _answer(connection: socket.socket, word: bytes, *, within_s: float) -> bytes | None:
    connection.settimeout(within_s)
    connection.sendall(word)
    try:
        return connection.recv(64)
    except TimeoutError:
        return None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to set rules of nftables")
async def test_partition_drops_packets_between_groups_until_it_ends() -> None:
    with _echo() as (parted_pid, parted), _echo() as (_, other):
        assert _answer(parted, b"before", within_s=_ANSWER_S) == b"before"
        with _parted({os.getpid()}, {parted_pid}):
            # Until the rules are in place.
            while _answer(parted, b"x", within_s=_SILENCE_S) is not None:
                pass
            assert _answer(other, b"still here", within_s=_ANSWER_S) == b"still here"
            assert _answer(parted, b"x", within_s=_SILENCE_S) is None
        parted.settimeout(_ANSWER_S)
        # TCP retransmits.
        assert set(parted.recv(1)) == set(b"x")


def test_missing_privilege_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SpecError, match="run as root"):
        network.partition({1}, {2}, ended=threading.Event(), within_s=0)
