"""TCP link that flips one bit of each payload sent by a chosen process."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch import Tensor

from kvtransfer.links.link import Link, LinkEnd, Operation
from kvtransfer.links.tcp import TcpLink

DAMAGING_LINK = f"{__name__}:damaging_link"


def mark_of(pid: int) -> Path:
    """Return the file whose presence makes process `pid` send damaged payloads."""
    return Path(tempfile.gettempdir()) / f"kv-faults-damage-{pid}"


def damaging_link(end: LinkEnd) -> Link:
    return _DamagingLink(end)


class _DamagingLink:
    """TcpLink with a modified `send`."""

    backend = "tcp"

    def __init__(self, end: LinkEnd) -> None:
        self._link = TcpLink(end)
        self.device, self.num_buffers = self._link.device, self._link.num_buffers

    def meet(self) -> None:
        self._link.meet()

    def send(self, payload: Tensor) -> Operation:
        if mark_of(os.getpid()).exists():
            payload = payload.clone()
            payload[payload.numel() // 2] ^= 4
        return self._link.send(payload)

    def recv(self, payload: Tensor) -> Operation:
        return self._link.recv(payload)

    def close(self) -> None:
        self._link.close()
