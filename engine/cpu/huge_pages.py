"""Memory in pages of 2 MiB instead of 4 KiB, where the system gives them to who asks: Linux, by madvise.

A step reads all weights and much of the KV once, far more than the processor knows the pages of; in a virtual machine
each page that it does not know costs two walks through tables.
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
_CHUNK = 32 << 20
_LINE = 64
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it


def advise(tensor: Tensor) -> None:
    """Ask for such pages wherever a whole one fits into this tensor; where there are none, nothing happens."""
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if end > first and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(c_void_p(first), c_size_t(end - first), mmap.MADV_HUGEPAGE)


def populate(tensors: Iterable[Tensor]) -> None:
    """Have these mapped before they are needed, their numbers as they are. Where the system cannot, nothing happens.

    A page that is touched for the first time has to be cleared, and in a virtual machine to be found by its host, too:
    5 ms for 2 MiB, in the middle of a step.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for tensor in tensors:
            first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            for begin in range(first, tensor.data_ptr() + tensor.nbytes - mmap.PAGESIZE, _CHUNK):
                end = min(begin + _CHUNK, tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                pool.submit(_libc().madvise, c_void_p(begin), c_size_t(end - begin), _MADV_POPULATE_WRITE)


class HugePages:
    """Tensors of any size beside each other, in chunks; a chunk lives as long as one of its tensors. Several threads
    may load models at once."""

    def __init__(self) -> None:
        self._lock = Lock()  # of `_chunk`
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers; begins at a cache line."""
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
