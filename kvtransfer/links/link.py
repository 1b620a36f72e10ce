"""A link moves bytes one way between two ranks, and fails rather than waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store

# For the two ends to find each other. It may be long: a peer that is killed or frozen is known by its gRPC stream.
MEET_TIMEOUT_S = 20.0


class Operation(Protocol):
    """A send or a receive that has been started."""

    def wait(self, *, timeout_s: float) -> None:
        """Until a payload that is sent may be overwritten, or one that is received is there.

        Raises LinkClosed, by the deadline at the latest.
        """
        ...


class Link(Protocol):
    """One direction between two ranks, for one epoch.

    One thread of each side sends or receives, in the same order, and may start several operations before it waits for
    the first; it waits in the order in which it has started them, and for every one: without that, the last bytes may
    never leave. `close` may come from any thread. The receiver must know when something comes and how large it is: both
    are announced beside the link. After one failed operation, or after `close`, every operation raises LinkClosed: a
    failed link is replaced under a new epoch, never repaired.
    """

    backend: str
    device: torch.device  # where payloads must live
    num_buffers: int  # payloads that this end should have under way at once

    def meet(self) -> None:
        """Find the other end, first of all and once. A link is made without waiting, so that its owner has it before it
        meets, and can close it meanwhile. Raises LinkClosed, by the deadline of its LinkEnd at the latest.
        """
        ...

    def send(self, payload: Tensor) -> Operation:
        """Start to send a contiguous uint8 tensor. Raises LinkClosed."""
        ...

    def recv(self, payload: Tensor) -> Operation:
        """Start to receive exactly as many bytes as `payload` (contiguous uint8) holds. Raises LinkClosed."""
        ...

    def close(self) -> None:
        """Fail what is pending, as soon as the backend can, and everything later. Never blocks; may be called again."""
        ...


@dataclass(frozen=True)
class LinkGuard:
    """How a link of our own keeps strangers out: what its two ends must have in common. Those of NCCL, Gloo and NIXL
    have nothing of the kind, and belong on private networks."""

    secret: bytes = field(repr=False)  # 32 bytes that both sides have, and no stranger
    is_encrypted: bool = False  # else whoever is on the way reads what passes, and may change it


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """All that one side needs to make its end of a link."""

    store: Store
    prefix: str  # unique to this link and epoch
    is_sender: bool
    host: str  # this side's own address, on the network that the peer reaches
    device: torch.device
    timeout_s: float  # for the two sides to meet
    guard: LinkGuard
