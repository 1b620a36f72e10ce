"""All ways to carry blocks, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.spec.plugin import find
from kvtransfer.links.gloo import GlooLink
from kvtransfer.links.link import Link, LinkEnd
from kvtransfer.links.nccl import NCCL_BYTES, NcclLink
from kvtransfer.links.nixl import NixlLink, check_nixl


def _tcp(end: LinkEnd) -> Link:
    from kvtransfer.links.tcp import TcpLink  # needs cryptography, which GPUs that have NCCL do without

    return TcpLink(end)


LINKS: dict[str, Callable[[LinkEnd], Link]] = {"tcp": _tcp, "gloo": GlooLink, "nccl": NcclLink, "nixl": NixlLink}


def make_link(backend: str, end: LinkEnd) -> Link:
    """This side's end, which is yet to meet the other one.

    backend: a name in LINKS, or MODULE:NAME; the same on both sides. Raises SpecError, and LinkClosed where this
    machine lacks what it needs.
    """
    return find(backend, LINKS)(end)


def device_bytes(backend: str) -> int:
    """What one link, of one direction, takes of its device's memory beside its payloads."""
    return NCCL_BYTES if backend == "nccl" else 0


def backend_for(device: torch.device, *, host_link: str) -> str:
    """What carries blocks of this device: what the deployment says (`kv.host_link`), but between GPUs NCCL unless that
    is nixl, which carries from either. Raises SpecError where that needs a package that is not here."""
    if host_link == "nixl":
        check_nixl()
        return host_link
    return "nccl" if device.type == "cuda" else host_link
