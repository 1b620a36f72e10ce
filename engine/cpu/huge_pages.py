"""Memory in 2 MiB pages where Linux grants them by madvise.

A step reads all weights and much of the KV once, far more than the TLB covers with 4 KiB pages. In a virtual machine
each TLB miss walks two page tables.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_size_t, c_void_p
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

_HUGE = 2 << 20
# Chunk size. On average, half of the last huge page touched in a chunk is wasted; untouched pages take no memory.
_CHUNK = 256 << 20
_POPULATED_AT_ONCE = 32 << 20
_LINE = 64
# Linux 5.14; not defined in Python 3.11.
_MADV_POPULATE_WRITE = 23


def advise(tensor: Tensor) -> None:
    """Request huge pages for the whole 2 MiB ranges inside a tensor. No-op if unsupported."""
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if end > first and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(c_void_p(first), c_size_t(end - first), mmap.MADV_HUGEPAGE)


def populate(tensors: Iterable[Tensor]) -> None:
    """Map the tensors' pages in advance, keeping their contents. No-op if unsupported.

    The first touch of a page clears it, and in a virtual machine also maps it in the host: 5 ms per 2 MiB, in the
    middle of a step.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for tensor in tensors:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            last = tensor.data_ptr() + tensor.nbytes
            for begin in range(first, last - mmap.PAGESIZE, _POPULATED_AT_ONCE):
                end = min(begin + _POPULATED_AT_ONCE, last) // mmap.PAGESIZE * mmap.PAGESIZE
                pool.submit(_libc().madvise, c_void_p(begin), c_size_t(end - begin), _MADV_POPULATE_WRITE)


def trim_heap() -> None:
    """Return freed memory to the system, which glibc keeps otherwise. No-op if unsupported."""
    if hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(c_size_t(0))


class HugePages:
    """Allocator of tensors in huge-page chunks. A chunk lives as long as any of its tensors. Thread-safe."""

    def __init__(self) -> None:
        # Guards `_chunk`.
        self._lock = Lock()
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor; the copy is aligned to a cache line."""
        memory = self._take(-(-tensor.nbytes // _LINE) * _LINE)[: tensor.nbytes]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if num_bytes > len(self._chunk):
                self._chunk = torch.empty(max(_CHUNK, num_bytes) + _LINE, dtype=torch.uint8)
                advise(self._chunk)
                self._chunk = self._chunk[-self._chunk.data_ptr() % _LINE :]
            memory, self._chunk = self._chunk[:num_bytes], self._chunk[num_bytes:]
        return memory


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
