"""Where a link's threads work on a device: beside what is computed there, not behind it.

Kernels of one CUDA stream run one behind the other, and the host is many layers ahead of the device. So a link that
packed on the stream that computes would ship a layer when the whole chunk is done. Each of its threads has a stream of
its own, and comes behind exactly what it needs: a mark says what that is. On a CPU everything is done when it returns,
and marks are of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.runner import streams


class StreamEvent:
    """What a thread has started on a device up to now."""

    def __init__(self, device: torch.device) -> None:
        """Of the calling thread's current stream."""
        self._event = streams.streams_of(device).mark()

    @property
    def is_over(self) -> bool:
        """The device has done it."""
        return self._event.is_over

    def hold_up(self) -> None:
        """What the calling thread starts on the device from now on comes behind it."""
        self._event.hold_up()

    def wait(self) -> None:
        """Return when the device has done it."""
        self._event.wait()


@contextmanager
def own_stream(device: torch.device) -> Iterator[int]:
    """Inside, what the calling thread starts on the device goes to a stream that nobody else has: its handle."""
    device_stream = streams.streams_of(device).device_stream()
    try:
        with device_stream.entered():
            yield device_stream.handle
    finally:
        device_stream.close()
