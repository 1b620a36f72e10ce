"""Links over a TCP connection, for hosts without GPUs."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future

import torch
from torch import Tensor

from core.types.errors import LinkClosed
from kvtransfer.links.connection import Connection, meet
from kvtransfer.links.encryption import Cipher, encrypted_size, pieces
from kvtransfer.links.link import LinkEnd, Operation


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
        self._wire: _Wire | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # guards the two fields above

    def meet(self) -> None:
        if self._is_closed:
            raise LinkClosed("the link is closed")
        connection, key = meet(self._end)
        with self._lock:
            self._wire = _Wire(connection, Cipher(key) if self._end.guard.is_encrypted else None)
        if self._is_closed:  # closed during the connect
            self.close()
            raise LinkClosed("the link is closed")

    def send(self, payload: Tensor) -> Operation:
        return self._met.send(payload.numpy().data)

    def recv(self, payload: Tensor) -> Operation:
        wire = self._met
        wire.connection.check()
        return _Receiving(wire.connection, payload.numpy().data, wire.encryptor)

    def close(self) -> None:
        with self._lock:
            self._is_closed, wire = True, self._wire
        if wire:
            wire.connection.close()
            wire.pusher.close()

    @property
    def _met(self) -> _Wire:
        if self._wire is None:
            raise LinkClosed("the link is not connected")
        return self._wire


class _Wire:
    """A connection with its encryptor and its pusher thread."""

    def __init__(self, connection: Connection, cipher: Cipher | None) -> None:
        self.connection = connection
        self.encryptor = _Encryptor(cipher) if cipher else None
        self.pusher = _Pusher(connection)

    def send(self, payload: memoryview) -> Operation:
        self.connection.check()
        if self.encryptor is None:
            remaining = self.connection.move_now(payload) if self.pusher.is_idle else payload
            return self.pusher.push(remaining) if remaining else _Sent()
        encrypted = self.encryptor.buffer(encrypted_size(len(payload)))
        num_sent = 0
        for num_encrypted in self.encryptor.cipher.encrypt(payload, encrypted):  # send each piece at once
            if self.pusher.is_idle:
                num_sent = num_encrypted - len(self.connection.move_now(encrypted[num_sent:num_encrypted]))
        remaining = encrypted[num_sent:]
        return _EncryptedReceiver(self.pusher.push(remaining) if remaining else _Sent(), encrypted, self.encryptor)


class _Sent:
    """Completed send: the whole payload is in the socket buffer."""

    def wait(self, *, timeout_s: float) -> None:
        pass


class _Receiving:
    def __init__(self, connection: Connection, payload: memoryview, encryptor: _Encryptor | None) -> None:
        self._connection = connection
        self._payload = payload
        self._encryptor = encryptor

    def wait(self, *, timeout_s: float) -> None:
        if self._encryptor is None:
            self._connection.move_all(self._payload, timeout_s=timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            for piece in pieces(self._payload):
                encrypted = self._encryptor.buffer(encrypted_size(len(piece)))
                self._connection.move_all(encrypted, timeout_s=max(0.0, deadline - time.monotonic()))
                self._encryptor.cipher.open(encrypted, piece)
                self._encryptor.free(encrypted)
        except LinkClosed:
            self._connection.close()
            raise


class _Encryptor:
    """A cipher and its reusable buffers, which avoid page faults on fresh memory."""

    def __init__(self, cipher: Cipher) -> None:
        self.cipher = cipher
        self._buffers: list[bytearray] = []

    def buffer(self, num_bytes: int) -> memoryview:
        """Take a buffer of `num_bytes` bytes. Return it with `free`."""
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < num_bytes:
            buffer = bytearray(num_bytes)
        return memoryview(buffer)[:num_bytes]

    def free(self, encrypted: memoryview) -> None:
        buffer = encrypted.obj
        assert isinstance(buffer, bytearray)
        self._buffers.append(buffer)


class _EncryptedReceiver:
    """Send of an encrypted payload in progress; frees the buffer when done."""

    def __init__(self, sending: Operation, encrypted: memoryview, encryptor: _Encryptor) -> None:
        self._sending = sending
        self._encrypted = encrypted
        self._encryptor = encryptor

    def wait(self, *, timeout_s: float) -> None:
        self._sending.wait(timeout_s=timeout_s)
        self._encryptor.free(self._encrypted)


class _Pusher:
    """Thread that sends data that did not fit into the socket buffer. Started on first use."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_pending = 0  # pushes not yet waited for; used by the link's thread only

    @property
    def is_idle(self) -> bool:
        return self._num_pending == 0

    def push(self, remaining: memoryview) -> Operation:
        """Queue data behind all earlier pushes. Raises LinkClosed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)
            self._thread.start()
        self._num_pending += 1
        sending = _Sending(self, remaining)
        self._left.put(sending)
        self._connection.check()  # after `close` the thread no longer reads the queue
        return sending

    def wait(self, sending: _Sending, *, timeout_s: float) -> None:
        """Wait until the data is in the socket buffer. Raises LinkClosed."""
        try:
            sending.done.result(timeout_s)
        except TimeoutError as error:
            self._connection.close()
            raise LinkClosed(f"tcp: send timed out after {timeout_s:.1f} s") from error
        self._num_pending -= 1

    def close(self) -> None:
        self._left.put(None)

    def _run(self) -> None:
        while sending := self._left.get():
            try:
                self._connection.move_all(sending.remaining, timeout_s=None)
                sending.done.set_result(None)
            except LinkClosed as error:
                sending.done.set_exception(error)


class _Sending:
    def __init__(self, pusher: _Pusher, remaining: memoryview) -> None:
        self.remaining = remaining
        self.done: Future[None] = Future()
        self._pusher = pusher

    def wait(self, *, timeout_s: float) -> None:
        self._pusher.wait(self, timeout_s=timeout_s)
