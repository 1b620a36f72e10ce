"""Links over a TCP connection of their own: between hosts without GPUs."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from cluster.errors import LinkClosed
from kvtransfer.link import LinkEnd, Operation

_PLACE = "place"  # the receiving end's word in the store: host, port, token
_TOKEN_BYTES = 16
_WELCOME = b"\1"
_GREETING_S = 2.0  # for a stranger that connects and says nothing


class TcpLink:
    """One connection, which the kernel keeps busy while the link's thread packs or writes.

    No thread of its own, and no words back and forth: a payload is pushed into the connection as far as there is room
    when it is started, and the rest when it is waited for. A peer that dies ends the connection, and `close` wakes
    whoever waits, so that a deadline is sat out only for a peer that is frozen or whose host is gone.
    """

    backend = "tcp"
    device = torch.device("cpu")

    def __init__(self, end: LinkEnd) -> None:
        try:
            self._socket = _connect(end) if end.is_sender else _accept(end)
        except (OSError, RuntimeError) as error:
            raise LinkClosed(f"link {end.prefix}: the peer did not come: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._move_bytes = self._socket.send if end.is_sender else self._socket.recv_into
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLOUT if end.is_sender else select.POLLIN)
        self._under_way: deque[_TcpOperation] = deque()
        self._closed = threading.Event()
        self._in_use = threading.Lock()  # somebody calls into the socket, which must stay open meanwhile

    def send(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def recv(self, payload: Tensor) -> Operation:
        return self._start(payload)

    def close(self) -> None:
        self._closed.set()
        self._release()

    def finish(self, operation: _TcpOperation, *, timeout_s: float) -> None:
        """Move bytes until this operation is done. Raises LinkClosed."""
        deadline = time.monotonic() + timeout_s
        with self._using_socket():
            while operation.left:
                self._move()
                if operation.left and not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                    raise TimeoutError(f"nothing moved for {timeout_s:.1f} s")

    def _start(self, payload: Tensor) -> Operation:
        operation = _TcpOperation(self, memoryview(payload.numpy()))
        self._under_way.append(operation)
        with self._using_socket():
            self._move()
        return operation

    def _move(self) -> None:
        """Move what can be moved now of what is under way, the oldest first. Raises OSError."""
        with suppress(BlockingIOError):
            while self._under_way:
                operation = self._under_way[0]
                while operation.left:
                    num_bytes = self._move_bytes(operation.left)
                    if not num_bytes:
                        raise ConnectionResetError("the peer has ended the connection")
                    operation.left = operation.left[num_bytes:]
                self._under_way.popleft()

    @contextmanager
    def _using_socket(self) -> Iterator[None]:
        try:
            with self._in_use:
                if self._closed.is_set():
                    raise ConnectionAbortedError("the link is closed")
                yield
        except OSError as error:
            self._closed.set()
            raise LinkClosed(f"tcp: {error}") from error
        finally:
            if self._closed.is_set():
                self._release()

    def _release(self) -> None:
        """End the connection, and give the socket back unless somebody is using it, who then does."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._in_use.acquire(blocking=False):
            self._socket.close()
            self._in_use.release()


class _TcpOperation:
    def __init__(self, link: TcpLink, left: memoryview) -> None:
        self._link = link
        self.left = left  # what has not been moved; belongs to the link's thread

    def wait(self, *, timeout_s: float) -> None:
        self._link.finish(self, timeout_s=timeout_s)


def _accept(end: LinkEnd) -> socket.socket:
    """Listen, leave word where, and let in whoever brings the token. Raises OSError."""
    deadline = time.monotonic() + end.timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in end.host else socket.AF_INET
    with socket.create_server((end.host, 0), family=family) as server:
        PrefixStore(end.prefix, end.store).set(_PLACE, f"{end.host} {server.getsockname()[1]} {token.hex()}")
        while True:
            server.settimeout(_seconds_until(deadline))
            connection, _ = server.accept()
            connection.settimeout(_GREETING_S)
            with suppress(OSError):
                if secrets.compare_digest(_read(connection, _TOKEN_BYTES), token):
                    connection.sendall(_WELCOME)
                    return connection
            connection.close()


def _connect(end: LinkEnd) -> socket.socket:
    """Find out where the other end listens, and be let in. Raises OSError, and RuntimeError from the store."""
    deadline = time.monotonic() + end.timeout_s
    place = PrefixStore(end.prefix, end.store)
    place.wait([_PLACE], timedelta(seconds=end.timeout_s))
    host, port, token = place.get(_PLACE).decode().split()
    connection = socket.create_connection((host, int(port)), _seconds_until(deadline))
    connection.sendall(bytes.fromhex(token))
    if _read(connection, len(_WELCOME)) != _WELCOME:
        connection.close()
        raise ConnectionRefusedError(f"{host}:{port} does not know this link")
    return connection


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Exactly so many; fewer when the other side has ended the connection. Raises OSError."""
    found = b""
    while len(found) < num_bytes and (some := connection.recv(num_bytes - len(found))):
        found += some
    return found


def _seconds_until(deadline: float) -> float:
    """Raises TimeoutError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("nobody came")
    return seconds
