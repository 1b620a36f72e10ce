"""TCP connection of a link: mutual authentication of its two ends, and one-way transport.

    receiver ──> sender      nonce
    sender   ──> receiver    nonce, and an HMAC over both
    receiver ──> sender      an HMAC over both

An eavesdropper cannot reuse a proof: each covers two fresh nonces, one link, one side and one mode. Both nonces have
exactly 32 bytes, so the signed bytes parse in one way only, whatever the link's name is. An encrypted link derives its
session key from the same nonces.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch.distributed import PrefixStore

from core.types.errors import LinkClosed
from kvtransfer.links.link import LinkEnd

_PLACE = "place"  # store key for the receiving end's address: "host port"
_NONCE_BYTES = _PROOF_BYTES = _KEY_BYTES = 32
_MAX_PENDING_PEERS = 64  # beyond this, the oldest is dropped
_PENDING_PEER_S = 2.0  # total time to authenticate


def meet(end: LinkEnd) -> tuple[Connection, bytes]:
    """Connect the two ends and authenticate each to the other.

    The receiving end listens and publishes its address in the store; the sending end connects. Returns the connection
    and its 32-byte session key. Raises LinkClosed, after timeout_s at the latest.
    """

    async def meet_in_time() -> tuple[socket.socket, bytes]:
        async with asyncio.timeout(end.timeout_s):
            return await (_connect(end) if end.is_sender else _accept(end))

    try:
        loop = asyncio.new_event_loop()  # before the coroutine exists: this fails without file descriptors
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            connected, key = runner.run(meet_in_time())
        return Connection(connected, is_sender=end.is_sender), key
    except (OSError, RuntimeError) as error:  # RuntimeError: the store's
        reason = str(error) or "timed out waiting for the peer"
        raise LinkClosed(f"link {end.prefix}: peer did not connect: {reason}") from error


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
        """Move all of `remaining`, blocking. timeout_s None: until the link is closed. Raises LinkClosed."""
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


@dataclass(frozen=True, kw_only=True)
class PeerAuthentication:
    """Mutual authentication of the ends of a link. nonces: the receiver's and the sender's, 64 bytes."""

    secret: bytes  # equal on both ends, like the other fields
    link: str  # unique name
    is_encrypted: bool

    def proof(self, nonces: bytes, *, is_sender: bool) -> bytes:
        """Return the HMAC-SHA256 that authenticates one side of the link."""
        assert len(nonces) == 2 * _NONCE_BYTES, "nonces are read in full"
        side = b"sender" if is_sender else b"receiver"
        return hmac.digest(self.secret, b"|".join((side, self._context)) + nonces, "sha256")

    def session_key(self, nonces: bytes) -> bytes:
        """Derive the 32-byte encryption key of this connection (HKDF-SHA256)."""
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=nonces, info=self._context).derive(self.secret)

    @property
    def _context(self) -> bytes:
        return b"|".join((b"sealed" if self.is_encrypted else b"clear", self.link.encode()))


async def _accept(end: LinkEnd) -> tuple[socket.socket, bytes]:
    """Listen, publish the address, and return the first peer that authenticates, with the session key.

    Authenticates all connecting peers concurrently, because a stranger may send nothing. Closes the others.
    """
    loop = asyncio.get_running_loop()
    authenticated: asyncio.Future[tuple[socket.socket, bytes]] = loop.create_future()

    def greeted(connection: socket.socket, greeting: asyncio.Task[bytes | None]) -> None:
        # A greeting may be cancelled before it starts, so it cannot close its connection itself.
        key = None if greeting.cancelled() or greeting.exception() else greeting.result()
        if key and not authenticated.done():
            authenticated.set_result((connection, key))
        else:
            connection.close()

    async def accept_all(server: socket.socket) -> None:
        pending_peers: list[asyncio.Task[bytes | None]] = []  # oldest first
        while True:
            try:
                connection, _ = await loop.sock_accept(server)
            except OSError:  # the peer hung up, or this process has no file descriptors left
                await asyncio.sleep(0.01)
                continue
            connection.setblocking(False)
            pending_peers = [peer for peer in pending_peers if not peer.done()]
            if len(pending_peers) >= _MAX_PENDING_PEERS:
                pending_peers.pop(0).cancel()
            pending_peers.append(asyncio.create_task(_authenticate_sender(connection, _authentication_of(end))))
            pending_peers[-1].add_done_callback(partial(greeted, connection))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are queued

    family = socket.AF_INET6 if ":" in end.host else socket.AF_INET
    with socket.create_server((end.host, 0), family=family) as server:
        server.setblocking(False)
        PrefixStore(end.prefix, end.store).set(_PLACE, f"{end.host} {server.getsockname()[1]}")
        accepting = asyncio.create_task(accept_all(server))
        try:
            return await authenticated
        except BaseException:  # the deadline, possibly in the loop turn in which a peer authenticates
            if authenticated.done() and not authenticated.cancelled():
                authenticated.result()[0].close()
            raise
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])  # before its socket is closed


async def _authenticate_sender(connection: socket.socket, authentication: PeerAuthentication) -> bytes | None:
    """Return the session key, or None if the peer cannot prove that it is the sender. Raises OSError."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(_PENDING_PEER_S):
        await loop.sock_sendall(connection, nonce)
        answer = await _read(connection, _NONCE_BYTES + _PROOF_BYTES)
        nonces, proof = nonce + answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not proof or not hmac.compare_digest(authentication.proof(nonces, is_sender=True), proof):
            return None
        await loop.sock_sendall(connection, authentication.proof(nonces, is_sender=False))
        return authentication.session_key(nonces)


async def _connect(end: LinkEnd) -> tuple[socket.socket, bytes]:
    """Look up the peer's address, connect and authenticate. Raises OSError, and RuntimeError from the store."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + end.timeout_s
    place = PrefixStore(end.prefix, end.store)
    place.wait([_PLACE], timedelta(seconds=end.timeout_s))
    host, port = place.get(_PLACE).decode().split()
    connection = socket.create_connection((host, int(port)), max(1e-3, deadline - loop.time()))
    connection.setblocking(False)
    try:
        nonce, authentication = await _read(connection, _NONCE_BYTES), _authentication_of(end)
        if len(nonce) < _NONCE_BYTES:
            raise ConnectionResetError(f"{host}:{port} closed the connection before sending its nonce")
        nonces = nonce + secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, nonces[_NONCE_BYTES:] + authentication.proof(nonces, is_sender=True))
        proof = await _read(connection, _PROOF_BYTES)
        if not hmac.compare_digest(authentication.proof(nonces, is_sender=False), proof):
            raise ConnectionRefusedError(f"{host}:{port} failed to authenticate for this link")
        return connection, authentication.session_key(nonces)
    except BaseException:  # includes a cancellation at the deadline
        connection.close()
        raise


def _authentication_of(end: LinkEnd) -> PeerAuthentication:
    return PeerAuthentication(secret=end.guard.secret, link=end.prefix, is_encrypted=end.guard.is_encrypted)


async def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes, or fewer if the peer closes the connection. Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        chunk = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not chunk:
            break
        data += chunk
    return data
