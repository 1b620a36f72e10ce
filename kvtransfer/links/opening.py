"""Which links there are, and how both ends of one come to be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.words.errors import TransferError
from kvtransfer.links.gloo import GlooLink
from kvtransfer.links.link import Link, LinkEnd
from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.tcp import TcpLink

_BACKENDS: dict[str, Callable[[LinkEnd], Link]] = {"tcp": TcpLink, "gloo": GlooLink, "nccl": NcclLink}


def open_link(backend: str, end: LinkEnd) -> Link:
    """Meet the other side, and return this side's end when both are there. Raises LinkClosed after end.timeout_s."""
    if backend not in _BACKENDS:
        raise TransferError(f"no link backend {backend!r}; there are {', '.join(_BACKENDS)}")
    return _BACKENDS[backend](end)


def backend_for(device: torch.device, *, host_link: str) -> str:
    """What carries blocks of this device: between GPUs NCCL, else what the deployment says (`kv.host_link`)."""
    return "nccl" if device.type == "cuda" else host_link
