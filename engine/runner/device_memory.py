"""Memory plan of a GPU: the KV pool gets what all other uses leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from core.types.errors import SpecError
from engine.config import GIB

# Fraction of the total: allocator fragmentation, staging of links and tiers, uploads.
_UNPLANNED = 0.02
_FIXES = (
    "raise tensor_parallel, lower max_batch_tokens or max_running, use a quantized checkpoint, or take a larger GPU"
)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one rank's device, measured after loading weights and kernels."""

    total: int
    free: int  # after the weights, CUDA, its libraries and other processes
    weights: int  # in the format used for products
    step: int  # activations and logits of the largest step
    sampling: int  # for max_running rows
    graphs: int
    links: int
    drafts: int = 0  # draft model with its KV

    @property
    def set_aside(self) -> int:
        """Part of the free memory that the pool must not use."""
        return self.step + self.sampling + self.graphs + self.links + self.drafts + self.unplanned

    @property
    def unplanned(self) -> int:
        return int(self.total * _UNPLANNED)

    @property
    def taken(self) -> int:
        """Memory of CUDA, its libraries and other processes."""
        return self.total - self.free - self.weights

    def pool_bytes(self, wanted: int | None, *, least: int) -> int:
        """Return the pool's size: `wanted`, or else all remaining memory.

        Raises SpecError if less than `wanted` or `least` remains.
        """
        room = self.free - self.set_aside
        if room < least:
            raise SpecError(
                f"the model leaves no room for KV on this GPU: of {_gib(self.total)} GiB {_gib(self.weights)} are "
                f"weights, {_gib(self.taken)} are taken, and steps need {_gib(self.set_aside)}; {_FIXES}"
            )
        if wanted is not None and wanted > room:
            raise SpecError(
                f"kv_memory_gib: {_gib(wanted)} GiB are not free on this GPU: of {_gib(self.total)} GiB "
                f"{_gib(self.weights)} are weights, {_gib(self.taken)} are taken, and steps need "
                f"{_gib(self.set_aside)}; at most {_gib(room)} are left, which is what it gets without the key"
            )
        return room if wanted is None else wanted

    def table(self, pool_bytes: int) -> str:
        """Return the plan in GiB, for the log."""
        parts = {
            "weights": self.weights,
            "KV": pool_bytes,
            "largest step": self.step,
            "sampling": self.sampling,
            "graphs": self.graphs,
            "links": self.links,
            **({"drafts": self.drafts} if self.drafts else {}),
            "CUDA and others": self.taken,
            "left": self.free - pool_bytes - self.set_aside + self.unplanned,
        }
        return f"of {_gib(self.total)} GiB: " + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def out_of_memory(device: torch.device, subject: str, error: torch.OutOfMemoryError) -> SpecError:
    """Return the error for running out of memory before a plan was made."""
    sentences = str(error).split(". ")
    return SpecError(f"{subject} do not fit on {device}: {'. '.join(sentences[:2])}. You can {_FIXES}")


class Gauge(Protocol):
    """Reader of a device's memory. Counts all processes."""

    @property
    def total(self) -> int: ...

    def free(self) -> int:
        """Return the free bytes, after releasing this process's cached memory."""
        ...

    def allocated(self) -> int:
        """Return the bytes held by tensors of this process."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Return the peak rise of memory during `work`, in bytes."""
        ...


class CudaGauge:
    """Gauge of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_of(self, work: Callable[[], object]) -> int:
        self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)  # including fragmentation
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
