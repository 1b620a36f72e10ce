"""Where a link's thread works on a device: beside what is computed there, not behind it.

Kernels of one CUDA stream run one behind the other, and the host is many layers ahead of the device. So a link that
packed on the stream that computes would ship a layer when the whole chunk is done. It has a stream of its own, and
comes behind exactly what it needs: a mark says what that is. On a CPU everything is done when it returns, and marks are
of nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Mark:
    """What a thread has started on a device up to now."""

    def __init__(self, device: torch.device) -> None:
        """Of the calling thread's current stream."""
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def hold_up(self) -> None:
        """What the calling thread starts on the device from now on comes behind it."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Return when the device has done it."""
        if self._event is not None:
            self._event.synchronize()


def own_lane(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what the calling thread starts on the device goes to a new stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
