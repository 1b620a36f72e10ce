"""CUDA streams and events of a link's threads, so that packing overlaps with computation.

The host runs many layers ahead of the device. A link that packed on the compute stream would ship a layer only after
the whole chunk. So each link thread has its own stream and waits for events of exactly the work that it needs. On a CPU
work is synchronous and events are no-ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.runner import streams


class StreamEvent:
    """Event on the calling thread's current stream, recorded at construction."""

    def __init__(self, device: torch.device) -> None:
        self._event = streams.streams_of(device).mark()

    @property
    def is_over(self) -> bool:
        """Return whether the device has reached the event."""
        return self._event.is_over

    def hold_up(self) -> None:
        """Make the calling thread's current stream wait for the event."""
        self._event.hold_up()

    def wait(self) -> None:
        """Block the host until the device has reached the event."""
        self._event.wait()


@contextmanager
def own_stream(device: torch.device) -> Iterator[int]:
    """Run the calling thread's device work on a private stream. Yields the stream's handle."""
    device_stream = streams.streams_of(device).device_stream()
    try:
        with device_stream.entered():
            yield device_stream.handle
    finally:
        device_stream.close()
