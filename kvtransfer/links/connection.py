"""The TCP connection of a link: how its two ends find each other, and bytes that go through it one way."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import PrefixStore

from core.types.errors import LinkClosed
from kvtransfer.links.acceptor import Acceptor
from kvtransfer.links.handshake import NONCE_BYTES, PROOF_BYTES, Handshake, new_nonce
from kvtransfer.links.link import LinkEnd

_PLACE = "place"  # the receiving end's word in the store: host, port


def meet(end: LinkEnd) -> tuple[Connection, bytes]:
    """The receiving end listens and leaves word where; the sending one connects, and each proves to the other who it
    is. Returns the connection, and a key of 32 bytes that only these two have. Raises LinkClosed after timeout_s."""
    try:
        connected, key = _connect(end) if end.is_sender else _accept(end)
        return Connection(connected, is_sender=end.is_sender), key
    except (OSError, RuntimeError) as error:
        raise LinkClosed(f"link {end.prefix}: the peer did not come: {error}") from error


class Connection:
    """A socket that bytes go through one way, and that any thread may close meanwhile."""

    def __init__(self, connected: socket.socket, *, is_sender: bool) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket = connected
        self._move = connected.send if is_sender else connected.recv_into
        self._poll = select.poll()
        self._poll.register(connected, select.POLLOUT if is_sender else select.POLLIN)
        self._closed = threading.Event()
        self._in_use = threading.Lock()  # somebody calls into the socket, whose number must stay its own meanwhile

    def move_now(self, left: memoryview) -> memoryview:
        """Move what can be moved at once. Returns the rest. Raises LinkClosed."""
        with self._using_socket():
            with suppress(BlockingIOError):
                while left:
                    num_bytes = self._move(left)
                    if not num_bytes:
                        raise ConnectionResetError("the peer has ended the connection")
                    left = left[num_bytes:]
            return left

    def move_all(self, left: memoryview, *, timeout_s: float | None) -> None:
        """Move all of it. None: until the link is closed. Raises LinkClosed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while left := self.move_now(left):
            with self._using_socket():
                wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
                if not self._poll.poll(wait_ms):
                    raise TimeoutError(f"it took longer than {timeout_s:.1f} s")

    def check(self) -> None:
        """Raises LinkClosed."""
        if self._closed.is_set():
            raise LinkClosed("the link is closed")

    def close(self) -> None:
        """End the connection, and give the socket back unless somebody is using it, who then does."""
        self._closed.set()
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._in_use.acquire(blocking=False):
            self._socket.close()
            self._in_use.release()

    @contextmanager
    def _using_socket(self) -> Iterator[None]:
        try:
            with self._in_use:
                self.check()
                yield
        except OSError as error:
            self._closed.set()
            raise LinkClosed(f"tcp: {error}") from error
        finally:
            if self._closed.is_set():
                self.close()


def _accept(end: LinkEnd) -> tuple[socket.socket, bytes]:
    """Listen, leave word where, and let in who proves to be the other end. Raises OSError."""
    family = socket.AF_INET6 if ":" in end.host else socket.AF_INET
    deadline = time.monotonic() + end.timeout_s
    with socket.create_server((end.host, 0), family=family) as server:
        acceptor = Acceptor(server, _handshake(end))
        PrefixStore(end.prefix, end.store).set(_PLACE, f"{end.host} {server.getsockname()[1]}")
        return acceptor.wait(until=deadline)


def _connect(end: LinkEnd) -> tuple[socket.socket, bytes]:
    """Find out where the other end listens, and be let in. Raises OSError, and RuntimeError from the store."""
    deadline = time.monotonic() + end.timeout_s
    place = PrefixStore(end.prefix, end.store)
    place.wait([_PLACE], timedelta(seconds=end.timeout_s))
    host, port = place.get(_PLACE).decode().split()
    connection = socket.create_connection((host, int(port)), _seconds_until(deadline))
    try:
        nonces = {"receiver_nonce": _read(connection, NONCE_BYTES, deadline), "sender_nonce": new_nonce()}
        if len(nonces["receiver_nonce"]) < NONCE_BYTES:
            raise ConnectionResetError(f"{host}:{port} has ended the connection before its nonce was whole")
        handshake = _handshake(end)
        connection.sendall(nonces["sender_nonce"] + handshake.proof(is_sender=True, **nonces))
        if handshake.is_proved(_read(connection, PROOF_BYTES, deadline), is_sender=False, **nonces):
            return connection, handshake.session_key(**nonces)
        raise ConnectionRefusedError(f"{host}:{port} does not know this link")
    except OSError:
        connection.close()
        raise


def _handshake(end: LinkEnd) -> Handshake:
    return Handshake(secret=end.guard.secret, link=end.prefix, is_encrypted=end.guard.is_encrypted)


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Exactly so many; fewer when the other side has ended the connection. Raises OSError."""
    found = b""
    while len(found) < num_bytes:
        connection.settimeout(_seconds_until(deadline))
        some = connection.recv(num_bytes - len(found))
        if not some:
            break
        found += some
    return found


def _seconds_until(deadline: float) -> float:
    """Raises TimeoutError when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("nobody came")
    return seconds
