"""The buffers through which a link's payloads pass: one is filled or emptied while another one is on the wire."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from kvtransfer.links.link import Operation


class StagingRing:
    """Belongs to a link's thread. Buffers are taken, put on the wire and released in one order.

    take ─> start ─> wait ─> release        take and start: the newest; wait and release: the oldest
    """

    def __init__(self, device: torch.device, *, num_buffers: int) -> None:
        self._device = device
        self._free = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        # Whole buffers, and the time that each may take.
        self._started: deque[tuple[Tensor, Operation, float]] = deque()
        self._taken = self._free[0]

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def take(self, num_bytes: int) -> Tensor:
        """The next free buffer, cut to size: uint8. There must be room."""
        self._taken = self._free.pop()
        if num_bytes > self._taken.numel():
            self._taken = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._taken[:num_bytes]

    def put_back(self) -> None:
        """What was taken last is not needed after all."""
        self._free.append(self._taken)

    def start(self, operation: Operation, *, timeout_s: float) -> None:
        """What was taken last is on the wire."""
        self._started.append((self._taken, operation, timeout_s))

    def wait(self) -> None:
        """Wait for the oldest that is on the wire. Raises LinkClosed."""
        _, operation, timeout_s = self._started[0]
        operation.wait(timeout_s=timeout_s)

    def release(self) -> None:
        """The oldest may be used again."""
        self._free.append(self._started.popleft()[0])

    def make_room(self) -> None:
        """Wait for the oldest, if every buffer is in use, and release it. Raises LinkClosed."""
        if not self.has_room:
            self.wait()
            self.release()

    def drain(self) -> None:
        """Wait for everything that is on the wire. Raises LinkClosed."""
        while self._started:
            self.wait()
            self.release()
