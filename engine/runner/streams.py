"""CUDA streams and events, as links, tiers and uploads use them.

A thread starts work on its current stream, and the device does it later. Work on one stream runs in order. Streams are
ordered among each other only by events, and with the host only when the host waits. On a CPU every operation is
synchronous, and this module does nothing.

Code that shares memory between streams must order the accesses with events. tests/support/fake_streams.py checks this:
it replaces `streams_of` and tracks what each read and write is ordered after.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.types.errors import SpecError

# cudaStreamNonBlocking: not ordered after the default stream, which computes.
_NON_BLOCKING = 1


class Event(Protocol):
    """Work that a thread had started on a device when the event was created."""

    def hold_up(self) -> None:
        """Order the calling thread's current stream after this event."""
        ...

    def wait(self) -> None:
        """Block until the device has reached the event."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the device has reached the event. Does not wait."""
        ...


class DeviceStream(Protocol):
    """Private stream in addition to the one that computes."""

    @property
    def handle(self) -> int:
        """Handle for the device's libraries."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Make this stream the calling thread's current one inside the context. One thread at a time."""
        ...

    def close(self) -> None:
        """Release the stream for reuse once its work is done. It must not be entered afterwards."""
        ...


class Streams(Protocol):
    """Stream operations of one device."""

    is_at_once: bool  # operations are synchronous

    def mark(self) -> Event:
        """Record an event on the calling thread's current stream."""
        ...

    def device_stream(self) -> DeviceStream: ...

    def synchronize(self) -> None:
        """Wait for the work on the calling thread's current stream."""
        ...

    def page_locked(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return host memory (size,) for one `upload`. The caller fills it and does not touch it afterwards."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """Start a copy to the device and return the device tensor. Keeps the host memory until the copy is done."""
        ...

    def lock_pages(self, memory: Tensor) -> None:
        """Page-lock host memory for its lifetime, so that `copy` is asynchronous. Raises SpecError."""
        ...

    def unlock_pages(self, memory: Tensor) -> None:
        """Unlock the memory. No copy may use it any more."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start a copy between the device and locked host memory, both contiguous."""
        ...


def streams_of(device: torch.device) -> Streams:
    return _streams_of(device)


def upload_indices(indices: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """Return the indices as (N,) int64 on the device. Does not wait for a GPU."""
    ours = streams_of(device)
    host_N = ours.page_locked(len(indices), torch.int64)
    host_N.numpy()[:] = indices
    return ours.upload(host_N)


@cache
def _streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else AtOnce()


class CudaStreams:
    """Streams of a GPU.

    These are driver streams. Torch has only 32 streams and hands them out in turn, so with many links one would wait
    for another's work. Driver streams are never destroyed; a closed one is reused, with the memory that torch caches
    for it.
    """

    is_at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()  # handles of closed streams; thread-safe

    def mark(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def device_stream(self) -> DeviceStream:
        try:
            handle = self._left.get_nowait()
        except queue.Empty:
            handle = new_driver_stream(self._device)
        return _CudaDeviceStream(handle, torch.cuda.ExternalStream(handle, self._device), self._left)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def page_locked(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self._device, non_blocking=True)  # torch reuses the host memory only after the copy

    def lock_pages(self, memory: Tensor) -> None:
        # Torch's allocator would round up to the next power of two.
        code = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            raise SpecError(
                f"kv_host_gib: cannot page-lock {memory.nbytes / 2**30:.1f} GiB of host memory for the GPU "
                f"(CUDA error {int(code)}): lower kv_host_gib, or raise `ulimit -l`"
            )

    def unlock_pages(self, memory: Tensor) -> None:
        _cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class AtOnce:
    """Streams of a synchronous device."""

    is_at_once = True

    def mark(self) -> Event:
        return self

    def device_stream(self) -> DeviceStream:
        return self

    @property
    def handle(self) -> int:
        return 0

    @property
    def is_over(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def hold_up(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def page_locked(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def upload(self, host: Tensor) -> Tensor:
        return host

    def lock_pages(self, memory: Tensor) -> None:
        pass

    def unlock_pages(self, memory: Tensor) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def hold_up(self) -> None:
        self._event.wait()

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def is_over(self) -> bool:
        return bool(self._event.query())


class _CudaDeviceStream:
    def __init__(self, handle: int, stream: torch.cuda.ExternalStream, left: queue.SimpleQueue[int]) -> None:
        self._handle = handle
        self._stream = stream
        self._left = left

    @property
    def handle(self) -> int:
        return self._handle

    def entered(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        # Do not reuse a stream with pending work: if that hangs, later work would hang, too.
        if self._stream.query():
            self._left.put(self._handle)


def new_driver_stream(device: torch.device) -> int:
    """Create a driver stream and return its handle. It is never destroyed."""
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _runtime().cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
    if code or not stream.value:
        raise RuntimeError(f"cannot create a CUDA stream on {device}: error {code}")
    return stream.value


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart())


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")


class DeviceEvent:
    """Implements engine.timing.pace.StepEvent on the current CUDA stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_past(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3
