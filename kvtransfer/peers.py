"""The ranks of one replica among themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from grpc import aio
from torch.distributed import Store

from cluster.channel import error_of, open_channel
from cluster.rank_host import RankHost
from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from engine.parallel import TensorParallel
from kvtransfer.meeting import local_store, remote_store
from kvtransfer.rank_servicer import RankServicer


class Peers:
    """The other ranks of this replica, as one rank sees them. Lives on the event loop."""

    def __init__(self, addresses: list[str], *, rank: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channels = {r: open_channel(a) for r, a in enumerate(addresses) if r != rank}
        self._stubs = {r: rpc.RankStub(channel) for r, channel in self._channels.items()}

    @classmethod
    async def connect(cls, addresses: list[str], *, rank: int, timeout_s: float) -> Peers:
        """Make the channels on the event loop that will use them."""
        return cls(addresses, rank=rank, timeout_s=timeout_s)

    async def open(self, request: pb.OpenRequest) -> None:
        """Open a handoff on every other rank. Raises ReplicaLost if one does not answer."""
        await self._all("Open", request)

    async def close_handoff(self, handoff: str) -> None:
        """Close a handoff on every other rank; when this returns, none of them writes to its blocks any more."""
        await self._all("Close", pb.CloseRequest(handoff=handoff))

    async def report(self, request: pb.ReportRequest) -> None:
        """Tell rank 0 about this rank's part of a handoff."""
        await self._call(0, "Report", request)

    def store(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float) -> Store:
        """The meeting at rank 0, as the other ranks see it."""
        return remote_store(self._stubs[0], loop, timeout_s=timeout_s)

    async def disconnect(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _all(self, method: str, request: Any) -> None:
        await asyncio.gather(*(self._call(rank, method, request) for rank in self._stubs))

    async def _call(self, rank: int, method: str, request: Any) -> None:
        try:
            await getattr(self._stubs[rank], method)(request, timeout=self._timeout_s)
        except aio.AioRpcError as error:
            raise error_of(error, peer=f"rank {rank}") from error


def open_gang(
    servicer: RankServicer,
    host: RankHost,
    addresses: list[str],
    *,
    rank: int,
    device: torch.device,
    start_s: float,
    ask_s: float,
) -> tuple[Peers, TensorParallel]:
    """Meet the other ranks of this replica, whose gRPC servers are at `addresses`.

    Blocks until all are there; raises ReplicaLost after `start_s`. `ask_s` bounds each later call between ranks.
    """
    connecting = Peers.connect(addresses, rank=rank, timeout_s=ask_s)
    peers = host.call(connecting, timeout_s=start_s)
    size = len(addresses)
    if size == 1:
        return peers, TensorParallel()
    if rank == 0:
        store = local_store(servicer.meeting, timeout_s=start_s)
    else:
        store = peers.store(host.loop, timeout_s=start_s)
    parallel = TensorParallel.join(
        store, prefix="gang", rank=rank, size=size, host=host.host, device=device, meet_s=start_s
    )
    return peers, parallel
