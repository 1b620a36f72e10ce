"""What goes where in a GPU's memory: the KV pool gets what is left when everything else is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from core.types.errors import SpecError
from engine.config import GIB

_UNPLANNED = 0.02  # of the whole: what torch cannot use between its tensors, staging of links and tiers, uploads
_FIXES = (
    "raise tensor_parallel, lower max_batch_tokens or max_running, set model.weights: quantized, or take a larger GPU"
)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one rank's device. Its weights are there, and its kernels have been loaded."""

    total: int
    free: int  # beside the weights, and what CUDA, its libraries and other processes have
    weights: int  # in the form in which they are multiplied
    step: int  # activations of the largest step, and its logits
    sampling: int  # of the most rows
    graphs: int
    links: int
    drafts: int = 0  # of a model that drafts, with its KV

    @property
    def set_aside(self) -> int:
        """Of what is free: the pool's share is the rest."""
        return self.step + self.sampling + self.graphs + self.links + self.drafts + self.unplanned

    @property
    def unplanned(self) -> int:
        return int(self.total * _UNPLANNED)

    @property
    def taken(self) -> int:
        """By CUDA, its libraries, and other processes."""
        return self.total - self.free - self.weights

    def pool_bytes(self, wanted: int | None, *, least: int) -> int:
        """What the pool gets: what the operator wants, or else all that is left. Raises SpecError where there is not so
        much, or less than `least`."""
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
        """For the log, in GiB."""
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


def does_not_fit(device: torch.device, what: str, error: torch.OutOfMemoryError) -> SpecError:
    """Memory ran out before anything could be planned."""
    said = str(error).split(". ")
    return SpecError(f"{what} do not fit on {device}: {'. '.join(said[:2])}. You can {_FIXES}")


class Gauge(Protocol):
    """Reads a device's memory. What it says counts everybody's."""

    @property
    def total(self) -> int: ...

    def free(self) -> int:
        """When what this process keeps for later has been given back."""
        ...

    def allocated(self) -> int:
        """By tensors of this process."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """How much more than before there was while `work` was done, at its highest."""
        ...


class CudaGauge:
    """Implements Gauge."""

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
        before = torch.cuda.memory_reserved(self._device)  # with what lies unused between tensors
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"
