"""Links over a TCP connection of their own: between hosts without GPUs."""

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
    """One connection, kept busy by the kernel's buffers while the link's thread packs or writes.

    A payload that is sent goes into those buffers at once as far as there is room; a thread pushes the rest, so that
    the next one can be packed meanwhile. One that is received is read when it is waited for: until then the kernel
    takes it in. A peer that dies ends the connection, and `close` wakes whoever waits: a deadline is sat out only for a
    peer that is frozen or whose host is gone. Encrypted, a payload is sealed before it is sent and opened, piece by
    piece, as it is read.
    """

    backend = "tcp"
    device = torch.device("cpu")

    def __init__(self, end: LinkEnd) -> None:
        self.num_buffers = 2 if end.is_sender else 1  # while one is written, the kernel takes in the next
        self._end = end
        self._wire: _Wire | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # of the two

    def meet(self) -> None:
        if self._is_closed:
            raise LinkClosed("the link is closed")
        connection, key = meet(self._end)
        with self._lock:
            self._wire = _Wire(connection, Cipher(key) if self._end.guard.is_encrypted else None)
        if self._is_closed:  # meanwhile
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
            raise LinkClosed("the link is closed, or its peer never came")
        return self._wire


class _Wire:
    """A connection, with what seals the payloads and what pushes them."""

    def __init__(self, connection: Connection, cipher: Cipher | None) -> None:
        self.connection = connection
        self.encryptor = _Encryptor(cipher) if cipher else None
        self.pusher = _Pusher(connection)

    def send(self, payload: memoryview) -> Operation:
        self.connection.check()
        if self.encryptor is None:
            left = self.connection.move_now(payload) if self.pusher.is_idle else payload
            return self.pusher.push(left) if left else _Sent()
        encrypted = self.encryptor.buffer(encrypted_size(len(payload)))
        num_sent = 0
        for num_encrypted in self.encryptor.cipher.fill_block(payload, encrypted):  # what is sealed leaves at once
            if self.pusher.is_idle:
                num_sent = num_encrypted - len(self.connection.move_now(encrypted[num_sent:num_encrypted]))
        left = encrypted[num_sent:]
        return _EncryptedReceiver(self.pusher.push(left) if left else _Sent(), encrypted, self.encryptor)


class _Sent:
    """All of it is in the kernel's buffers."""

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
    """A cipher, and buffers for what it seals: memory that was touched once costs less the next time."""

    def __init__(self, cipher: Cipher) -> None:
        self.cipher = cipher
        self._buffers: list[bytearray] = []

    def buffer(self, num_bytes: int) -> memoryview:
        """One that is in use until `free`."""
        buffer = self._buffers.pop() if self._buffers else bytearray()
        if len(buffer) < num_bytes:
            buffer = bytearray(num_bytes)
        return memoryview(buffer)[:num_bytes]

    def free(self, encrypted: memoryview) -> None:
        buffer = encrypted.obj
        assert isinstance(buffer, bytearray)
        self._buffers.append(buffer)


class _EncryptedReceiver:
    """A sealed payload on its way."""

    def __init__(self, sending: Operation, encrypted: memoryview, encryptor: _Encryptor) -> None:
        self._sending = sending
        self._encrypted = encrypted
        self._encryptor = encryptor

    def wait(self, *, timeout_s: float) -> None:
        self._sending.wait(timeout_s=timeout_s)
        self._encryptor.free(self._encrypted)


class _Pusher:
    """A thread, if there ever is something to push, that sends what does not fit into the kernel's buffers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._left: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_waited_for = 0  # belongs to the link's thread

    @property
    def is_idle(self) -> bool:
        return self._num_waited_for == 0

    def push(self, left: memoryview) -> Operation:
        """Send this after everything that was pushed before. Raises LinkClosed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-push", daemon=True)
            self._thread.start()
        self._num_waited_for += 1
        sending = _Sending(self, left)
        self._left.put(sending)
        self._connection.check()  # after `close` nobody looks there any more
        return sending

    def wait(self, sending: _Sending, *, timeout_s: float) -> None:
        """Until it is in the kernel's buffers. Raises LinkClosed."""
        try:
            sending.done.result(timeout_s)
        except TimeoutError as error:
            self._connection.close()
            raise LinkClosed(f"tcp: it took longer than {timeout_s:.1f} s") from error
        self._num_waited_for -= 1

    def close(self) -> None:
        self._left.put(None)

    def _run(self) -> None:
        while sending := self._left.get():
            try:
                self._connection.move_all(sending.left, timeout_s=None)
                sending.done.set_result(None)
            except LinkClosed as error:
                sending.done.set_exception(error)


class _Sending:
    def __init__(self, pusher: _Pusher, left: memoryview) -> None:
        self.left = left
        self.done: Future[None] = Future()
        self._pusher = pusher

    def wait(self, *, timeout_s: float) -> None:
        self._pusher.wait(self, timeout_s=timeout_s)
