"""Numbers on their way back from a device, while that goes on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def download(tensors: Seq[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Begin to copy what is enqueued to be computed, on a stream of copies: what is enqueued afterwards does not wait
    for it, nor is waited for. Returns what waits for the copies. All tensors are of one device; a CPU's are not copied.
    """
    device = tensors[0].device
    if device.type != "cuda":
        return lambda: [tensor.numpy() for tensor in tensors]
    computed, copied, stream = torch.cuda.Event(), torch.cuda.Event(), _copies(device)
    computed.record(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        copied.record(stream)

    def wait() -> list[NDArray[Any]]:
        copied.synchronize()
        assert len(tensors) == len(hosts)  # kept until now: nothing else gets their memory while it is copied
        return [host.numpy() for host in hosts]

    return wait


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
