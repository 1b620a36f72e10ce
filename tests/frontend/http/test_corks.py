"""What is written to one connection in one turn of the loop leaves together; and no socket is kept for that."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from frontend.http import corks
from frontend.http.corks import CorkedConnection, Corks
from frontend.http.polled_server import PolledServer

_IN_TIME_S = 20.0


class Pair:
    """A connection to a listener, and its end here, as gRPC would have it."""

    def __init__(self, host: str, family: int, *, is_mapped: bool = False) -> None:
        self._open = ExitStack()
        listener = self._open.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("::" if is_mapped else host, 0))
        listener.listen()
        self.port = listener.getsockname()[1]
        self.client = self._open.enter_context(socket.create_connection((host, self.port)))
        self.served = self._open.enter_context(listener.accept()[0])
        port = self.client.getsockname()[1]
        self.peer = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    @property
    def is_corked(self) -> bool:
        return bool(self.served.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK))

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair("127.0.0.1", socket.AF_INET)
    yield pair
    pair.close()


def _found(held: Corks, connection: CorkedConnection) -> bool:
    """Whether its socket is found, by turns in which two messages are written to it."""
    for _ in range(200):
        for _ in range(2):
            held.writes(connection)
        held.release()
    return connection.socket is not None


def _num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_several_of_a_turn_wait_for_its_end(pair: Pair) -> None:
    held = Corks()
    held.listen(pair.port)
    connection = held.join(pair.peer)
    assert _found(held, connection)

    def turn(num_messages: int) -> list[bool]:
        are_held = []
        for _ in range(num_messages):
            held.writes(connection)
            are_held.append(pair.is_corked)
        held.release()
        assert not pair.is_corked
        return are_held

    assert turn(3) == [True, True, True]
    assert turn(1) == [True]
    assert turn(1) == [False] and turn(3) == [False, True, True], "it may be alone again, and would wait for nothing"
    assert turn(2) == [True, True]
    held.leave(connection)


def test_one_message_a_turn_is_never_held_back(pair: Pair) -> None:
    held = Corks()
    held.listen(pair.port)
    connection = held.join(pair.peer)
    for _ in range(200):
        held.writes(connection)
        held.release()
    assert connection.socket is None and not connection.is_sought


def test_the_last_call_of_a_connection_takes_its_socket_along(pair: Pair) -> None:
    held, before = Corks(), _num_files()
    held.listen(pair.port)
    one, other = held.join(pair.peer), held.join(pair.peer)
    assert one is other and _found(held, one) and _num_files() == before + 1
    held.leave(one)
    for _ in range(2):
        held.writes(one)
    assert pair.is_corked
    held.leave(one)
    assert not pair.is_corked and _num_files() == before
    held.release()
    another = held.join(pair.peer)
    assert _found(held, another)
    held.leave(another)


@pytest.mark.parametrize(
    ("host", "family", "is_mapped"),
    [("127.0.0.1", socket.AF_INET, False), ("::1", socket.AF_INET6, False), ("127.0.0.1", socket.AF_INET6, True)],
)
def test_each_kind_of_address(host: str, family: int, is_mapped: bool) -> None:
    try:
        pair = Pair(host, family, is_mapped=is_mapped)
    except OSError:
        pytest.skip("no IPv6 here")
    held = Corks()
    held.listen(pair.port)
    connection = held.join(pair.peer)
    assert _found(held, connection)
    held.leave(connection)
    pair.close()


def test_sockets_of_another_port_or_of_others_are_left_alone(pair: Pair) -> None:
    held, before = Corks(), _num_files()
    held.listen(pair.port + 1)
    connection, pending_peer = held.join(pair.peer), held.join("ipv4:127.0.0.1:1")
    assert not _found(held, connection) and not _found(held, pending_peer)
    assert _num_files() == before


def test_a_search_takes_few_files_at_a_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands, and streams wait meanwhile."""
    held, looked_at, find = Corks(), 0, corks.socket_at

    def count(descriptor: int) -> socket.socket | None:
        nonlocal looked_at
        looked_at += 1
        return find(descriptor)

    monkeypatch.setattr(corks, "socket_at", count)
    held.listen(pair.port)
    nobody = held.join("ipv4:127.0.0.1:1")
    with ExitStack() as files:
        for _ in range(300):
            files.enter_context(open(os.devnull))
        held.writes(nobody)
        held.writes(nobody)
        before = 0
        while nobody.is_sought and (looked_at > before or not looked_at):
            before = looked_at
            held.release()
            assert looked_at - before <= 64
        assert looked_at >= 300


async def test_a_server_holds_back_what_its_calls_write_at_once() -> None:
    go, num_held, service = asyncio.Event(), 0, _Service()
    server = PolledServer([], [("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([service])
    port = server.add_insecure_port("127.0.0.1:0")

    async def answer(messages: Any, context: Any) -> None:
        nonlocal num_held
        while not num_held:
            await go.wait()
            await context.write(b"x")
            num_held += any(_corked(port))

    service.handler = answer
    await server.start()
    async with asyncio.timeout(_IN_TIME_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.stream_stream("/test/any")() for _ in range(4)]
        reading = [asyncio.ensure_future(_read(call)) for call in calls]
        while not all(one.done() for one in reading):
            go.set()  # all of them in one turn
            go.clear()
            await asyncio.sleep(0)
        assert all(await asyncio.gather(*reading))
        assert not any(_corked(port))
    await server.stop(None)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    handler: Any = None

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self.handler)


async def _read(call: Any) -> list[bytes]:
    return [message async for message in call]


def _corked(port: int) -> Iterator[bool]:
    """Of the sockets of this process at that port."""
    for name in os.listdir("/proc/self/fd"):
        if (found := corks.socket_at(int(name))) is not None:
            with found:
                if found.getsockname()[1] == port:
                    yield bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK))


def test_where_no_file_may_be_opened_nothing_is_held_back(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(path: str) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", reject)
    held = Corks()
    held.listen(pair.port)
    assert not _found(held, held.join(pair.peer))


def test_locks_on_files_stay(tmp_path: Path) -> None:
    """A process loses a lock with the first descriptor of that file that it closes (fcntl(2))."""
    with open(tmp_path / "locked", "w") as locked:
        fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert corks.socket_at(locked.fileno()) is None
        asks = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", asks, locked.name], stderr=subprocess.PIPE, timeout=_IN_TIME_S)
    assert b"BlockingIOError" in other.stderr


def test_no_more_sockets_are_held_than_so_many() -> None:
    with ExitStack() as pairs:
        held = Corks(max_held=2)
        connections = []
        for _ in range(3):
            pair = Pair("127.0.0.1", socket.AF_INET)
            pairs.callback(pair.close)
            held.listen(pair.port)
            connections.append(held.join(pair.peer))
        first, second, third = connections
        assert _found(held, first) and _found(held, second) and not _found(held, third)
        held.leave(first)
        held.leave(third)
        again = held.join(third.peer)
        assert _found(held, again)
        for connection in (second, again):
            held.leave(connection)


async def test_what_cannot_be_begun_holds_nothing_back(pair: Pair) -> None:
    server = PolledServer([], [("grpc.so_reuseport", 0)])
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    server.corks.listen(pair.port)
    connection = server.corks.join(pair.peer)
    assert _found(server.corks, connection)
    looked = asyncio.Event()

    class FakeCall:
        def start_server_batch(self, operations: Any, done: Any) -> None:
            asyncio.get_running_loop().call_soon(looked.set)
            raise ValueError("too many operations")

    for _ in range(2):
        with pytest.raises(ValueError, match="too many"):
            server.write(connection, FakeCall(), (), print)
    assert pair.is_corked
    await asyncio.wait_for(looked.wait(), _IN_TIME_S)
    assert not pair.is_corked
    server.corks.leave(connection)
    await server.stop(None)
