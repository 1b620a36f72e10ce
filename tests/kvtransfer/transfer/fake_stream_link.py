"""A link between two fake devices in one process: bytes move on a stream of its own, as NCCL's do."""

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
    """All that is under way, by link."""

    def __init__(self, streams: FakeStreams, *, num_buffers: int = 2) -> None:
        self.streams = streams
        self.num_buffers = num_buffers
        self.sent: defaultdict[str, queue.SimpleQueue[tuple[Tensor, Clock]]] = defaultdict(queue.SimpleQueue)
        self.held: list[
            _Operation
        ] = []  # of links that have failed, for as long as the device may be at their payloads

    def open(self, end: LinkEnd) -> FakeStreamLink:
        return FakeStreamLink(self, end)

    def let_go(self) -> None:
        """The device has ended what closed links had under way."""
        for operation in self.held:
            operation.event.wait()


class FakeStreamLink:
    """Implements Link. A payload is read when its sending is started, for all that the sender can know, and until its
    operation has been waited for; it is written to from when its receipt is started. What a closed link had under way
    it holds, as NcclLink does."""

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
        """They are in one process."""

    def send(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=True)

    def recv(self, payload: Tensor) -> _Operation:
        return _Operation(self, payload, is_sending=False)

    def close(self) -> None:
        self.is_closed = True
        self.hold()

    def hold(self) -> None:
        """What is under way now."""
        self.wires.held += self.under_way

    def take(self, timeout_s: float) -> tuple[Tensor, Clock]:
        """What was sent next. Raises LinkClosed."""
        for _ in range(int(timeout_s / _POLL_S) + 1):
            if self.is_closed:
                break
            try:
                return self.sent.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise LinkClosed("the link is closed, or nothing came")


class _Operation:
    def __init__(self, link: FakeStreamLink, payload: Tensor, *, is_sending: bool) -> None:
        self._link, self._payload, self._is_sending = link, payload, is_sending
        self._streams = streams = link.wires.streams
        if link.is_closed:
            raise LinkClosed("the link is closed")
        behind = streams.mark()
        with streams.watched(link.name):
            behind.hold_up()
            # On its way from now on: what touches the payload before this has been waited for is a race.
            streams.launch("wire", **{"reads" if is_sending else "writes": [payload]})
            self.event = streams.mark()
        link.under_way.append(self)
        if link.is_closed:  # meanwhile
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
