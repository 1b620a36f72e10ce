"""Link interface: one-way byte transport between two ranks, with its staging buffers. Operations have deadlines.

On a device the host runs many layers ahead. A link that packed on the compute stream would ship a layer only after the
whole chunk. So each link thread has its own CUDA stream and waits for events of exactly the work that it needs. On a
CPU work is synchronous and events are no-ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store

from engine.runner import streams

# Time for the two ends to connect. It may be long, because the gRPC stream detects a dead or frozen peer.
MEET_TIMEOUT_S = 20.0


class Operation(Protocol):
    """Send or receive in progress."""

    def wait(self, *, timeout_s: float) -> None:
        """Wait until a sent payload may be overwritten, or a received one is complete.

        Raises LinkClosed on failure, at the deadline at the latest.
        """
        ...


@dataclass(frozen=True)
class Waiting:
    """Operation that waits through its link. wait_for: called with the timeout in seconds."""

    wait_for: Callable[[float], None]

    def wait(self, *, timeout_s: float) -> None:
        self.wait_for(timeout_s)


class Link(Protocol):
    """One direction between two ranks, for one epoch.

    One thread per side sends or receives, in the same order. It may start several operations before it waits for the
    first, but must wait for every one, in order: without the wait, the last bytes may never leave. `close` may be
    called from any thread. Payload sizes are announced outside the link. After a failed operation or `close`, every
    operation raises LinkClosed: a failed link is replaced under a new epoch, never repaired.
    """

    backend: str
    device: torch.device  # of the payloads
    num_buffers: int  # recommended number of payloads in flight at this end

    def meet(self) -> None:
        """Connect to the other end. Call this once, before any operation.

        The constructor does not wait, so that the owner can close the link while it connects. Raises LinkClosed, at
        the deadline of its LinkEnd at the latest.
        """
        ...

    def send(self, payload: Tensor) -> Operation:
        """Start sending a contiguous uint8 tensor. Raises LinkClosed."""
        ...

    def recv(self, payload: Tensor) -> Operation:
        """Start receiving exactly `payload.numel()` bytes into a contiguous uint8 tensor. Raises LinkClosed."""
        ...

    def close(self) -> None:
        """Fail pending operations as soon as the backend can, and all later ones. Never blocks; idempotent."""
        ...


@dataclass(frozen=True)
class LinkGuard:
    """Authentication of a tcp link. NCCL, Gloo and NIXL links have none and need a private network."""

    secret: bytes = field(repr=False)  # 32 bytes, shared by both ends
    is_encrypted: bool = False  # False: payloads can be read and changed on the network


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """Parameters of one end of a link."""

    store: Store
    prefix: str  # unique to this link and epoch
    is_sender: bool
    host: str  # own address, reachable by the peer
    device: torch.device
    timeout_s: float  # for the two ends to connect
    guard: LinkGuard


class StagingRing:
    """Ring of a link's staging buffers: one is packed or unpacked while another is on the wire.

    Used by the link's thread only. Buffers are taken and released in the same order.

    take ─> start ─> wait ─> release        take and start the newest; wait for and release the oldest
    """

    def __init__(self, device: torch.device, *, num_buffers: int) -> None:
        self._device = device
        self._free = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        # Each whole buffer, its operation, and the operation's timeout in seconds.
        self._started: deque[tuple[Tensor, Operation, float]] = deque()
        self._taken = self._free[0]

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def take(self, num_bytes: int) -> Tensor:
        """Take a free buffer and return a uint8 view of `num_bytes` bytes. Requires `has_room`."""
        self._taken = self._free.pop()
        if num_bytes > self._taken.numel():
            self._taken = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._taken[:num_bytes]

    def put_back(self) -> None:
        """Return the last taken buffer unused."""
        self._free.append(self._taken)

    def start(self, operation: Operation, *, timeout_s: float) -> None:
        """Mark the last taken buffer as being on the wire."""
        self._started.append((self._taken, operation, timeout_s))

    def wait(self) -> None:
        """Wait for the oldest operation. Raises LinkClosed."""
        _, operation, timeout_s = self._started[0]
        operation.wait(timeout_s=timeout_s)

    def release(self) -> None:
        """Return the oldest buffer to the ring."""
        self._free.append(self._started.popleft()[0])

    def make_room(self) -> None:
        """Wait for the oldest operation and release its buffer if none is free. Raises LinkClosed."""
        if not self.has_room:
            self.wait()
            self.release()

    def drain(self) -> None:
        """Wait for all operations and release their buffers. Raises LinkClosed."""
        while self._started:
            self.wait()
            self.release()


def stream_event(device: torch.device) -> streams.Event:
    """Record an event on the calling thread's current stream."""
    return streams.streams_of(device).mark()


@contextmanager
def own_stream(device: torch.device) -> Iterator[int]:
    """Run the calling thread's device work on a private stream. Yields the stream's handle."""
    device_stream = streams.streams_of(device).device_stream()
    try:
        with device_stream.entered():
            yield device_stream.handle
    finally:
        device_stream.close()
