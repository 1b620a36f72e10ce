"""Memory in pages of 2 MiB instead of 4 KiB, where the system gives them to who asks: Linux, by madvise.

A step reads all weights and much of the KV once, far more than the processor knows the pages of; in a virtual machine
each page that it does not know costs two walks through tables.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 32 << 20
_LINE = 64


def advise(tensor: Tensor) -> None:
    """Ask for such pages wherever a whole one fits into this tensor; where there are none, nothing happens."""
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE * _HUGE
    if end > first and hasattr(mmap, "MADV_HUGEPAGE"):
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


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
