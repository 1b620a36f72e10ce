"""Where a link's threads work on a device: beside what is computed there, not behind it.

Kernels of one CUDA stream run one behind the other, and the host is many layers ahead of the device. So a link that
packed on the stream that computes would ship a layer when the whole chunk is done. Each of its threads has a stream of
its own, and comes behind exactly what it needs: a mark says what that is. On a CPU everything is done when it returns,
and marks are of nothing.

Torch's own streams are no such thing: it has 32, and hands them out in turn, so that from some links on one link would
wait behind what another one waits for. These are of the driver. None is destroyed: the next lane takes what an ended
one has left, and with it the memory that torch keeps by stream.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache

import torch

_NON_BLOCKING = 1  # cudaStreamNonBlocking: not behind the stream that computes, which is the device's default one


class Mark:
    """What a thread has started on a device up to now."""

    def __init__(self, device: torch.device) -> None:
        """Of the calling thread's current stream."""
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @property
    def is_over(self) -> bool:
        """The device has done it."""
        return self._event is None or self._event.query()

    def hold_up(self) -> None:
        """What the calling thread starts on the device from now on comes behind it."""
        if self._event is not None:
            self._event.wait()

    def wait(self) -> None:
        """Return when the device has done it."""
        if self._event is not None:
            self._event.synchronize()


@contextmanager
def own_lane(device: torch.device) -> Iterator[int]:
    """Inside, what the calling thread starts on the device goes to a stream that nobody else has: its handle."""
    if device.type != "cuda":
        yield 0
        return
    free = _free_streams(device)
    try:
        handle = free.get_nowait()
    except queue.Empty:
        handle = new_driver_stream(device)
    stream = torch.cuda.ExternalStream(handle, device)
    try:
        with torch.cuda.stream(stream):
            yield handle
    finally:
        if stream.query():  # else something hangs there, and everything after it would
            free.put(handle)


@cache
def _free_streams(device: torch.device) -> queue.SimpleQueue[int]:
    """Those of this process that no lane has. Any thread takes and leaves."""
    return queue.SimpleQueue()


def new_driver_stream(device: torch.device) -> int:
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _runtime().cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
    if code or not stream.value:
        raise RuntimeError(f"CUDA makes no stream on {device}: error {code}")
    return stream.value


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
