"""Staging buffers of a link: one is packed or unpacked while another is on the wire."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from kvtransfer.links.link import Operation


class StagingRing:
    """Ring of staging buffers, used by the link's thread only. Buffers are taken and released in the same order.

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
