"""What is started on a device, and what comes behind what: all that links, tiers and uploads know of streams.

Work on a device is started by threads, on each thread's current stream, and is done later. Works of one stream come one
behind the other; between two streams there is no order but by a mark, and none between a stream and the host but where
the host waits. On a CPU everything is done when it returns, and all of this does nothing.

Whoever writes to memory that somebody else reads says by a mark which comes first. tests/support/fake_streams.py checks
that: it takes the place of `streams_of`, and knows of every read and write what it comes behind.
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

_NON_BLOCKING = 1  # cudaStreamNonBlocking: not behind the stream that computes, which is the device's default one


class Event(Protocol):
    """What a thread had started on a device when it made this."""

    def hold_up(self) -> None:
        """What the calling thread starts on its current stream from now on comes behind it."""
        ...

    def wait(self) -> None:
        """Return when the device has done it."""
        ...

    @property
    def is_over(self) -> bool:
        """The device has done it. Does not wait."""
        ...


class DeviceStream(Protocol):
    """A stream of its own, beside the one that computes."""

    @property
    def handle(self) -> int:
        """By which libraries of the device know it."""
        ...

    def entered(self) -> AbstractContextManager[object]:
        """Inside, what the calling thread starts goes there. One thread at a time."""
        ...

    def close(self) -> None:
        """Nobody enters it any more: another lane may have its stream, when nothing is left on it."""
        ...


class Streams(Protocol):
    """Of one device."""

    is_at_once: bool  # everything is done when it returns

    def mark(self) -> Event:
        """On the calling thread's current stream."""
        ...

    def device_stream(self) -> DeviceStream: ...

    def synchronize(self) -> None:
        """Wait for what was started on the calling thread's current stream."""
        ...

    def page_locked(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host, (size,), for one `upload`: to be filled by the host, and then left alone."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """The same on the device. This returns before it is there; the memory of the host is kept until then."""
        ...

    def lock_pages(self, memory: Tensor) -> None:
        """Of the host, so that `copy` need not wait for it; for as long as it lives. Raises SpecError."""
        ...

    def unlock_pages(self, memory: Tensor) -> None:
        """When nothing copies from or to it any more."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy between the device and locked memory of the host, both contiguous."""
        ...


def streams_of(device: torch.device) -> Streams:
    return _streams_of(device)


def upload_indices(indices: Sequence[int] | NDArray[np.int64], device: torch.device) -> Tensor:
    """As int64, (N,). This returns before a GPU has them."""
    ours = streams_of(device)
    host_N = ours.page_locked(len(indices), torch.int64)
    host_N.numpy()[:] = indices
    return ours.upload(host_N)


@cache
def _streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else AtOnce()


class CudaStreams:
    """Implements Streams on a GPU.

    Torch's own streams are no lanes: it has 32, and hands them out in turn, so that from some links on one would wait
    behind what another one waits for. These are of the driver. None is destroyed: the next lane takes what an ended one
    has left, and with it the memory that torch keeps by stream.
    """

    is_at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()  # by ended lanes; any thread takes and leaves

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
        return host.to(self._device, non_blocking=True)  # torch hands its memory to nobody else until it is there

    def lock_pages(self, memory: Tensor) -> None:
        # Not by torch's allocator, which rounds up to the next power of two.
        code = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            raise SpecError(
                f"kv_host_gib: this machine does not lock {memory.nbytes / 2**30:.1f} GiB of memory for the GPU "
                f"(CUDA error {int(code)}): take less, or raise `ulimit -l`"
            )

    def unlock_pages(self, memory: Tensor) -> None:
        _cudart().cudaHostUnregister(memory.data_ptr())

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)


class AtOnce:
    """Implements Streams where everything is done when it returns."""

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
        if self._stream.query():  # else something hangs there, and everything after it would
            self._left.put(self._handle)


def new_driver_stream(device: torch.device) -> int:
    """The handle of a stream that nobody else has. Nobody destroys it."""
    stream = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _runtime().cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
    if code or not stream.value:
        raise RuntimeError(f"CUDA makes no stream on {device}: error {code}")
    return stream.value


def _cudart() -> Any:
    return cast(Any, torch.cuda.cudart())


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
