"""Links over a TCP connection, for hosts without GPUs.

An encrypted payload is AES-GCM in pieces:

    (up to 256 KiB of ciphertext, 16-byte tag), repeated

Both ends know the payload's size, so pieces need no length. Pieces are numbered over the lifetime of the link, and the
number is the nonce: a changed, dropped, repeated or reordered piece fails to decrypt. A piece fits into a CPU cache.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from core.types.errors import LinkClosed
from kvtransfer.links.connection import Connection, meet
from kvtransfer.links.link import LinkEnd, Operation, Waiting

_PIECE_BYTES = 256 << 10
_TAG_BYTES = 16
_NONCE_BYTES = 12


class TcpLink:
    """Link over one TCP connection; the kernel's socket buffers overlap transport with packing.

    `send` writes as much as fits into the socket buffer; a thread pushes the rest, so that the next payload can be
    packed meanwhile. A receive reads in `wait`; until then the kernel buffers the data. A dying peer resets the
    connection and `close` wakes waiting threads, so only a frozen peer or a lost host costs a full deadline. Encrypted
    payloads are encrypted before they are sent, and decrypted piece by piece as they are read.
    """

    backend = "tcp"
    device = torch.device("cpu")

    def __init__(self, end: LinkEnd) -> None:
        # The receiver needs one: the kernel buffers the next payload while this one is written to the pool.
        self.num_buffers = 2 if end.is_sender else 1
        self._end = end
        self._cipher: Cipher | None = None
        # Not an executor: Python joins those at exit, even one whose peer does not read.
        self._to_push: queue.SimpleQueue[tuple[memoryview, Future[None]] | None] = queue.SimpleQueue()
        self._pusher: threading.Thread | None = None  # started on first use
        self._num_pushed = 0  # sends queued to it and not yet waited for; used by the link's thread only
        self._connection: Connection | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # guards the two fields above

    def meet(self) -> None:
        if self._is_closed:
            raise LinkClosed("the link is closed")
        connection, key = meet(self._end)
        self._cipher = Cipher(key) if self._end.guard.is_encrypted else None
        with self._lock:
            self._connection = connection
        if self._is_closed:  # closed during the connect
            self.close()
            raise LinkClosed("the link is closed")

    def send(self, payload: Tensor) -> Operation:
        connection, remaining = self._connected, payload.numpy().data
        encrypted: memoryview | None = None
        if self._cipher is None:
            remaining = self._send_now(connection, remaining)
        else:
            encrypted = self._cipher.buffer(len(remaining))
            remaining = self._send_encrypted(connection, self._cipher, remaining, encrypted)
        pushed = self._push(connection, remaining) if remaining else None
        return Waiting(lambda timeout_s: self._wait_sent(connection, pushed, encrypted, timeout_s))

    def recv(self, payload: Tensor) -> Operation:
        connection = self._connected
        return Waiting(lambda timeout_s: self._receive(connection, payload.numpy().data, timeout_s))

    def close(self) -> None:
        with self._lock:
            self._is_closed, connection = True, self._connection
        if connection:
            connection.close()
        self._to_push.put(None)

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise LinkClosed("the link is not connected")
        self._connection.check()
        return self._connection

    def _send_now(self, connection: Connection, remaining: memoryview) -> memoryview:
        """Send as much as possible without blocking, behind all earlier sends, and return the rest."""
        return remaining if self._num_pushed else connection.move_now(remaining)

    def _send_encrypted(
        self, connection: Connection, cipher: Cipher, payload: memoryview, encrypted: memoryview
    ) -> memoryview:
        """Send each piece as soon as it is encrypted. Returns the bytes that did not fit into the socket buffer."""
        num_sent = 0
        for num_encrypted in cipher.encrypt(payload, encrypted):
            num_sent = num_encrypted - len(self._send_now(connection, encrypted[num_sent:num_encrypted]))
        return encrypted[num_sent:]

    def _push(self, connection: Connection, remaining: memoryview) -> Future[None]:
        """Let the pusher send the rest, behind all earlier sends."""
        if self._pusher is None:
            self._pusher = threading.Thread(target=self._run_pusher, args=(connection,), name="kv-push", daemon=True)
            self._pusher.start()
        pushed: Future[None] = Future()
        self._to_push.put((remaining, pushed))
        connection.check()  # after `close` the thread no longer reads the queue
        self._num_pushed += 1
        return pushed

    def _run_pusher(self, connection: Connection) -> None:
        while job := self._to_push.get():
            remaining, pushed = job
            try:
                connection.move_all(remaining, timeout_s=None)
                pushed.set_result(None)
            except LinkClosed as error:
                pushed.set_exception(error)

    def _wait_sent(
        self, connection: Connection, pushed: Future[None] | None, encrypted: memoryview | None, timeout_s: float
    ) -> None:
        """Wait until the data is in the socket buffer."""
        if pushed:
            try:
                pushed.result(timeout_s)
            except TimeoutError as error:
                connection.close()
                raise LinkClosed(f"tcp: send timed out after {timeout_s:.1f} s") from error
            self._num_pushed -= 1
        if self._cipher and encrypted:
            self._cipher.free(encrypted)

    def _receive(self, connection: Connection, payload: memoryview, timeout_s: float) -> None:
        if self._cipher is None:
            connection.move_all(payload, timeout_s=timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            for start, end in _pieces(len(payload)):
                encrypted = self._cipher.buffer(end - start)
                connection.move_all(encrypted, timeout_s=max(0.0, deadline - time.monotonic()))
                self._cipher.decrypt(encrypted, payload[start:end])
                self._cipher.free(encrypted)
        except LinkClosed:
            connection.close()
            raise


class Cipher:
    """Cipher of one end of an encrypted link, with reusable buffers, which avoid page faults on fresh memory.

    Used by the link's thread only.
    """

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes, used for this link and direction only."""
        self._aead = AESGCM(key)
        self._count = 0
        self._buffers: list[bytearray] = []

    def buffer(self, num_bytes: int) -> memoryview:
        """Take a buffer for a payload of `num_bytes` bytes, encrypted. Return it with `free`."""
        size = _encrypted_size(num_bytes)
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < size:
            buffer = bytearray(size)
        return memoryview(buffer)[:size]

    def free(self, encrypted: memoryview) -> None:
        buffer = encrypted.obj
        assert isinstance(buffer, bytearray)
        self._buffers.append(buffer)

    def encrypt(self, payload: memoryview, encrypted: memoryview) -> Iterator[int]:
        """Encrypt into `encrypted`, a `buffer` of the payload's size. Yields the bytes filled after each piece."""
        for start, end in _pieces(len(payload)):
            into = encrypted[_encrypted_size(start) : _encrypted_size(end)]
            self._aead.encrypt_into(self._next_nonce(), payload[start:end], None, into)
            yield _encrypted_size(end)

    def decrypt(self, encrypted: memoryview, piece: memoryview) -> None:
        """Decrypt the next piece of a payload into `piece`. Raises LinkClosed if authentication fails."""
        try:
            self._aead.decrypt_into(self._next_nonce(), encrypted, None, piece)
        except InvalidTag:
            raise LinkClosed("tcp: received data failed authentication") from None

    def _next_nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each piece of a payload."""
    return ((start, min(start + _PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, _PIECE_BYTES))


def _encrypted_size(num_bytes: int) -> int:
    """Return the size on the wire of a payload of `num_bytes` bytes."""
    return num_bytes + _TAG_BYTES * -(-num_bytes // _PIECE_BYTES)
