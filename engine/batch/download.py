"""Numbers on their way back from a device, while that goes on."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runner import streams
from engine.runner.streams import DeviceStream


def download(tensors: Seq[Tensor]) -> Callable[[], list[NDArray[Any]]]:
    """Begin to copy what is enqueued to be computed, on a lane of copies: what is enqueued afterwards does not wait for
    it, nor is waited for. Returns what waits for the copies. All tensors are of one device; a CPU's are not copied.
    """
    device = tensors[0].device
    ours = streams.streams_of(device)
    if ours.is_at_once:
        return lambda: [tensor.numpy() for tensor in tensors]
    tensors = [tensor.contiguous() for tensor in tensors]
    computed = ours.mark()
    with copy_stream(device).entered():
        computed.hold_up()
        hosts = [ours.page_locked(tensor.numel(), tensor.dtype).view(tensor.shape) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            ours.copy(host, tensor)
        copied = ours.mark()

    def wait() -> list[NDArray[Any]]:
        copied.wait()
        assert len(tensors) == len(hosts)  # kept until now: nothing else gets their memory while it is copied
        return [host.numpy() for host in hosts]

    return wait


@cache
def copy_stream(device: torch.device) -> DeviceStream:
    return streams.streams_of(device).device_stream()
