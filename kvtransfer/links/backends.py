"""Link backends by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.spec.plugin import find
from kvtransfer.links.gloo import GlooLink
from kvtransfer.links.link import Link, LinkEnd
from kvtransfer.links.nccl import NcclLink
from kvtransfer.links.nixl import NixlLink, check_nixl


def _tcp(end: LinkEnd) -> Link:
    # Imported on demand, because it needs cryptography, which NCCL links do not.
    from kvtransfer.links.tcp import TcpLink

    return TcpLink(end)


LINKS: dict[str, Callable[[LinkEnd], Link]] = {"tcp": _tcp, "gloo": GlooLink, "nccl": NcclLink, "nixl": NixlLink}


def make_link(backend: str, end: LinkEnd) -> Link:
    """Create this side's end of a link, not yet connected.

    backend: a name in LINKS, or MODULE:NAME; the same on both sides. Raises SpecError, and LinkClosed if this machine
    lacks the library.
    """
    return find(backend, LINKS)(end)


def backend_for(device: torch.device, *, host_link: str) -> str:
    """Return the backend for blocks on `device`.

    CPU blocks use `kv.host_link`. CUDA blocks use NCCL, or nixl if that is the host link. Raises SpecError if the
    nixl package is missing.
    """
    if host_link == "nixl":
        check_nixl()
        return host_link
    return "nccl" if device.type == "cuda" else host_link
