"""Fake NCCL without a GPU: sends bytes through a socket, and any call may hang."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from kvtransfer.links.link import LinkEnd
from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.nccl_library import Nccl, NcclError


@dataclass(eq=False)
class _Communicator:
    listening: socket.socket | None
    connected: socket.socket | None = None
    left: memoryview = field(default_factory=lambda: memoryview(b""))
    is_sender: bool = False


class FakeNccl(Nccl):
    """Calls whose names are in `hanging` return when `release` is called, and `abort` of the communicator does so for
    those that have one."""

    def __init__(self, hanging: Collection[str] = ()) -> None:
        self.hanging = hanging
        self.called: list[tuple[str, str]] = []  # function and thread name
        self.hangs = threading.Event()  # set while a call hangs
        self._released = threading.Event()
        self._listening: dict[bytes, socket.socket] = {}
        self._communicators: dict[int, _Communicator] = {}

    @property
    def num_listening(self) -> int:
        return len(self._listening)

    def release(self) -> None:
        self._released.set()

    def new_id(self) -> bytes:
        self._called("new_id")
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)
        id = str(server.getsockname()[1]).encode().ljust(128, b"\xff")  # any bytes
        self._listening[id] = server
        return id

    def dismiss(self, id: bytes) -> None:
        if server := self._listening.pop(id, None):
            server.close()

    def begin(self, id: bytes, *, rank: int) -> int:
        self._called("begin")
        communicator = _Communicator(self._listening.get(id))
        if rank == 1:
            communicator.connected = socket.create_connection(("127.0.0.1", int(id.rstrip(b"\xff"))))
            communicator.connected.setblocking(False)
        number = len(self._communicators) + 1
        self._communicators[number] = communicator
        return number

    def is_ready(self, communicator: int) -> bool:
        at = self._communicators[communicator]
        try:
            with suppress(BlockingIOError):
                if at.connected is None:
                    assert at.listening
                    at.connected, _ = at.listening.accept()
                    at.connected.setblocking(False)
                while at.left:
                    num_bytes = at.connected.send(at.left) if at.is_sender else at.connected.recv_into(at.left)
                    if not num_bytes:
                        raise NcclError("the peer is gone")
                    at.left = at.left[num_bytes:]
        except OSError as error:
            raise NcclError(str(error)) from error
        return at.connected is not None and not at.left

    def send(self, communicator: int, address: int, num_bytes: int, *, to: int, stream: int) -> None:
        self._called("send")
        self._start(communicator, address, num_bytes, is_sender=True)

    def recv(self, communicator: int, address: int, num_bytes: int, *, of: int, stream: int) -> None:
        self._called("recv")
        self._start(communicator, address, num_bytes, is_sender=False)

    def abort(self, communicator: int) -> None:
        at = self._communicators.pop(communicator)
        for one in (at.listening, at.connected):
            if one:
                one.close()
        self._called("abort")
        self._released.set()

    def _start(self, communicator: int, address: int, num_bytes: int, *, is_sender: bool) -> None:
        at = self._communicators[communicator]
        at.left = memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")
        at.is_sender = is_sender

    def _called(self, what: str) -> None:
        self.called.append((what, threading.current_thread().name))
        if what in self.hanging:
            self.hangs.set()
            self._released.wait()


def fake_nccl_link(end: LinkEnd) -> NcclLink:
    """Create a link, under a name that a spec could use."""
    return NcclLink(end, nccl=FakeNccl())
