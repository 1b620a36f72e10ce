"""Copies from the device to the host that overlap with compute."""

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
    """Start copying tensors to the host on the copy stream, after the work queued so far.

    Returns a function that waits for the copies. Work queued later neither waits for them nor delays them. All tensors
    must be on one device; CPU tensors are not copied.
    """
    device = tensors[0].device
    device_streams = streams.streams_of(device)
    if device_streams.is_at_once:
        return lambda: [tensor.numpy() for tensor in tensors]
    tensors = [tensor.contiguous() for tensor in tensors]
    computed = device_streams.mark()
    with copy_stream(device).entered():
        computed.hold_up()
        hosts = [device_streams.page_locked(tensor.numel(), tensor.dtype).view(tensor.shape) for tensor in tensors]
        for host, tensor in zip(hosts, tensors, strict=True):
            device_streams.copy(host, tensor)
        copied = device_streams.mark()

    def wait() -> list[NDArray[Any]]:
        copied.wait()
        # Refer to the tensors so that their memory is not reused during the copy.
        assert len(tensors) == len(hosts)
        return [host.numpy() for host in hosts]

    return wait


@cache
def copy_stream(device: torch.device) -> DeviceStream:
    return streams.streams_of(device).device_stream()
