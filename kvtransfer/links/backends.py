"""All ways to carry blocks, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.words.plugin import find
from kvtransfer.links.gloo import GlooLink
from kvtransfer.links.link import Link, LinkEnd
from kvtransfer.links.nccl import NCCL_BYTES, NcclLink
from kvtransfer.links.tcp import TcpLink

LINKS: dict[str, Callable[[LinkEnd], Link]] = {"tcp": TcpLink, "gloo": GlooLink, "nccl": NcclLink}


def open_link(backend: str, end: LinkEnd) -> Link:
    """Meet the other side, and return this side's end when both are there.

    backend: a name in LINKS, or MODULE:NAME; the same on both sides. Raises LinkClosed after timeout_s, and SpecError.
    """
    return find(backend, LINKS)(end)


def device_bytes(backend: str) -> int:
    """What one link, of one direction, takes of its device's memory beside its payloads."""
    return NCCL_BYTES if backend == "nccl" else 0


def backend_for(device: torch.device, *, host_link: str) -> str:
    """What carries blocks of this device: between GPUs NCCL, else what the deployment says (`kv.host_link`)."""
    return "nccl" if device.type == "cuda" else host_link
