"""Receiving process of a link measurement, controlled by the near side (core.process.child_process)."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from core.identity.credentials import Identity
from core.process.child_process import obey
from core.rpc.transfer_pb2_grpc import add_RankServicer_to_server
from core.wire.rank_server import RankHost
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from kvtransfer.links.link import LinkGuard
from kvtransfer.profile.near_side import FAR, HOST, TIMEOUT_S, link_config
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver


class FarSide:
    """Receiver whose public methods are commands. Times are on the host's monotonic clock, shared by its processes."""

    def __init__(self) -> None:
        self.servicer = RankServicer()
        self.guard = LinkGuard(b"")
        self._host = RankHost(HOST, Identity(FAR, None))
        self._landings: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

    def agree(self, secret: str, is_encrypted: bool) -> str:
        """Set the link authentication, and return the address. Must be the first command."""
        self.guard = LinkGuard(bytes.fromhex(secret), is_encrypted)
        return self._host.serve(lambda server: add_RankServicer_to_server(self.servicer, server))

    def make_pool(self, layout: dict[str, Any], num_blocks: int, wire_dtype: str, backend: str) -> None:
        """Create the pool and the receiver for handoffs of this layout."""
        layout |= {name: tuple(numbers) for name, numbers in layout.items() if isinstance(numbers, list)}
        pool = KVPool(KVLayout(**layout), num_blocks=num_blocks, device=torch.device("cpu"))
        self.servicer.receiver = Receiver(
            link_config(self._host.identity, pool, wire_dtype=wire_dtype, backend=backend, guard=self.guard),
            rendezvous=self.servicer.rendezvous,
            on_landed=lambda landing: self._landings.put((landing.handoff, time.monotonic())),
        )

    def open(self, handoff: str, num_tokens: int, num_blocks: int) -> None:
        assert self.servicer.receiver, "call make_pool first"
        opening = Opening(
            handoff=handoff, num_tokens=num_tokens, max_tokens=num_tokens, block_ids=tuple(range(num_blocks))
        )
        self.servicer.receiver.open(opening)

    def landed(self, handoff: str) -> float:
        """Wait for a handoff to land and return the time in seconds."""
        found, at = self._landings.get(timeout=TIMEOUT_S)
        assert found == handoff, f"expected handoff {handoff}, landed {found}"
        return at


def serve(make: Callable[[], FarSide]) -> NoReturn:
    """Execute commands until the near side closes the connection."""
    torch.set_num_threads(1)
    obey(make)
    os._exit(0)  # link threads may be in C++ code that must not run during interpreter shutdown


if __name__ == "__main__":
    serve(FarSide)
