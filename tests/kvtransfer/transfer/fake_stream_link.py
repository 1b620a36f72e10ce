"""Fake link between two fake devices in one process. Bytes move on a separate stream, as with NCCL."""

from __future__ import annotations

import queue
from collections import defaultdict

import torch
from torch import Tensor

from core.types.errors import LinkClosed
from kvtransfer.links.link import LinkEnd
from tests.support.fake_streams import Clock, FakeStreams

_POLL_S = 0.02


class FakeWires:
    """Operations in flight of all links."""

    def __init__(self, streams: FakeStreams, *, num_buffers: int = 2) -> None:
        self.streams = streams
        self.num_buffers = num_buffers
        self.sent: defaultdict[str, queue.SimpleQueue[tuple[Tensor, Clock]]] = defaultdict(queue.SimpleQueue)
        self.held: list[_Operation] = []  # of failed links, while the device may use their payloads

    def open(self, end: LinkEnd) -> FakeStreamLink:
        return FakeStreamLink(self, end)

    def let_go(self) -> None:
        """Wait until the device has finished the operations of closed links."""
        for operation in self.held:
            operation.event.wait()


class FakeStreamLink:
    """Fake link; implements Link.

    A sent payload is read from the start of the send until its operation was waited for; a received one is written from
    the start of the receive. A closed link holds its operations in flight, as NcclLink does.
    """

    backend = "fake"
    device = torch.device("cpu")

    def __init__(self, wires: FakeWires, end: LinkEnd) -> None:
        self.num_buffers = wires.num_buffers
        self.wires = wires
        self.name = f"{end.prefix} {'out' if end.is_sender else 'in'}"
        self.sent = wires.sent[end.prefix]
        self.is_closed = False
        self.under_way: list[_Operation] = []

    def meet(self) -> None:
        """Do nothing, because both ends are in one process."""

    def send(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=True)

    def recv(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=False)

    def close(self) -> None:
        self.is_closed = True
        self.hold()

    def hold(self) -> None:
        """Keep the operations in flight."""
        self.wires.held += self.under_way

    def take(self, timeout_s: float) -> tuple[Tensor, Clock]:
        """Return the next payload that was sent. Raises LinkClosed."""
        for _ in range(int(timeout_s / _POLL_S) + 1):
            if self.is_closed:
                break
            try:
                return self.sent.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise LinkClosed("the link is closed, or the receive timed out")


class _Operation:
    def __init__(self, link: FakeStreamLink, payload: Tensor, *, is_sending: bool) -> None:
        self._link, self._payload, self._is_sending = link, payload, is_sending
        self._streams = streams = link.wires.streams
        if link.is_closed:
            raise LinkClosed("the link is closed")
        behind = streams.mark()
        with streams.watched(link.name):
            behind.hold_up()
            # In flight from here on: any access to the payload before the wait is a race.
            streams.launch("wire", **{"reads" if is_sending else "writes": [payload]})
            self.event = streams.mark()
        link.under_way.append(self)
        if link.is_closed:  # closed by another thread
            link.hold()
        if is_sending:
            link.sent.put((torch.from_numpy(payload.numpy().copy()), self.event.clock))

    def wait(self, *, timeout_s: float) -> None:
        if not self._is_sending:
            data, sent = self._link.take(timeout_s)
            self._streams.join(self._link.name, sent)
            self._payload.numpy()[:] = data.numpy()
            self.event.clock |= sent
        self.event.wait()
        self._link.under_way.remove(self)
