"""The ranks of one replica among themselves."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import torch
from grpc import aio
from torch.distributed import TCPStore

from cluster.channel import error_of, open_channel
from cluster.errors import ReplicaLost
from cluster.rank_host import RankHost
from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from engine.parallel import TensorParallel
from kvtransfer.rank_servicer import RankServicer

_ASK_AGAIN_S = 0.1


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

    async def meeting_place(self, *, timeout_s: float) -> str:
        """Where the ranks meet, as rank 0 says; it may not know yet."""
        async with asyncio.timeout(timeout_s):
            while not (store := (await self._stubs[0].Meet(pb.MeetRequest(), wait_for_ready=True)).store):
                await asyncio.sleep(_ASK_AGAIN_S)
            return store

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
    timeout = timedelta(seconds=start_s)
    if rank == 0:
        store = TCPStore(host.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        servicer.meeting_place = f"{host.host}:{store.port}"
    else:
        address, port = _ask_for_place(peers, host, rank=rank, start_s=start_s).rsplit(":", 1)
        store = TCPStore(address, int(port), is_master=False, timeout=timeout)
    parallel = TensorParallel.join(
        store, prefix="gang", rank=rank, size=size, host=host.host, device=device, meet_s=start_s
    )
    return peers, parallel


def _ask_for_place(peers: Peers, host: RankHost, *, rank: int, start_s: float) -> str:
    try:
        return host.call(peers.meeting_place(timeout_s=start_s), timeout_s=start_s + 1)
    except (TimeoutError, aio.AioRpcError) as error:
        raise ReplicaLost(f"rank {rank}: rank 0 did not say where to meet within {start_s} s") from error
