"""TCP connection of a link: setup between its two ends, and one-way transport."""

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

_PLACE = "place"  # store key for the receiving end's address: "host port"


def meet(end: LinkEnd) -> tuple[Connection, bytes]:
    """Connect the two ends and authenticate each to the other.

    The receiving end listens and publishes its address in the store; the sending end connects. Returns the connection
    and its 32-byte session key. Raises LinkClosed, after timeout_s at the latest.
    """
    try:
        connected, key = _connect(end) if end.is_sender else _accept(end)
        return Connection(connected, is_sender=end.is_sender), key
    except (OSError, RuntimeError) as error:
        raise LinkClosed(f"link {end.prefix}: peer did not connect: {error}") from error


class Connection:
    """One-way socket that any thread may close during use."""

    def __init__(self, connected: socket.socket, *, is_sender: bool) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket = connected
        self._move = connected.send if is_sender else connected.recv_into
        self._poll = select.poll()
        self._poll.register(connected, select.POLLOUT if is_sender else select.POLLIN)
        self._closed = threading.Event()
        # Held during socket calls, so that the file descriptor is not closed and reused meanwhile.
        self._in_use = threading.Lock()

    def move_now(self, remaining: memoryview) -> memoryview:
        """Move as much as possible without blocking and return the rest. Raises LinkClosed."""
        with self._using_socket():
            with suppress(BlockingIOError):
                while remaining:
                    num_bytes = self._move(remaining)
                    if not num_bytes:
                        raise ConnectionResetError("peer closed the connection")
                    remaining = remaining[num_bytes:]
            return remaining

    def move_all(self, remaining: memoryview, *, timeout_s: float | None) -> None:
        """Move all of `left`, blocking. timeout_s None: until the link is closed. Raises LinkClosed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while remaining := self.move_now(remaining):
            with self._using_socket():
                wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
                if not self._poll.poll(wait_ms):
                    raise TimeoutError(f"timed out after {timeout_s:.1f} s")

    def check(self) -> None:
        """Raise LinkClosed if the link is closed."""
        if self._closed.is_set():
            raise LinkClosed("the link is closed")

    def close(self) -> None:
        """Shut the connection down. If a thread is using the socket, that thread closes it."""
        self._closed.set()
        with suppress(OSError):  # shut down already
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
    """Listen, publish the address, and accept the authenticated peer. Raises OSError."""
    family = socket.AF_INET6 if ":" in end.host else socket.AF_INET
    deadline = time.monotonic() + end.timeout_s
    with socket.create_server((end.host, 0), family=family) as server:
        acceptor = Acceptor(server, _handshake(end))
        PrefixStore(end.prefix, end.store).set(_PLACE, f"{end.host} {server.getsockname()[1]}")
        return acceptor.wait(until=deadline)


def _connect(end: LinkEnd) -> tuple[socket.socket, bytes]:
    """Look up the peer's address, connect and authenticate. Raises OSError, and RuntimeError from the store."""
    deadline = time.monotonic() + end.timeout_s
    place = PrefixStore(end.prefix, end.store)
    place.wait([_PLACE], timedelta(seconds=end.timeout_s))
    host, port = place.get(_PLACE).decode().split()
    connection = socket.create_connection((host, int(port)), _seconds_until(deadline))
    try:
        nonces = {"receiver_nonce": _read(connection, NONCE_BYTES, deadline), "sender_nonce": new_nonce()}
        if len(nonces["receiver_nonce"]) < NONCE_BYTES:
            raise ConnectionResetError(f"{host}:{port} closed the connection before sending its nonce")
        handshake = _handshake(end)
        connection.sendall(nonces["sender_nonce"] + handshake.proof(is_sender=True, **nonces))
        if handshake.is_proved(_read(connection, PROOF_BYTES, deadline), is_sender=False, **nonces):
            return connection, handshake.session_key(**nonces)
        raise ConnectionRefusedError(f"{host}:{port} failed to authenticate for this link")
    except OSError:
        connection.close()
        raise


def _handshake(end: LinkEnd) -> Handshake:
    return Handshake(secret=end.guard.secret, link=end.prefix, is_encrypted=end.guard.is_encrypted)


def _read(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Read `num_bytes` bytes, or fewer if the peer closes the connection. Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(_seconds_until(deadline))
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            break
        data += chunk
    return data


def _seconds_until(deadline: float) -> float:
    """Return the remaining seconds. Raises TimeoutError if the deadline has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out waiting for the peer")
    return seconds
