"""The gRPC face of one rank towards other ranks: links come in here, and the ranks of a replica speak to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from cluster.channel import abort_with, error_of, open_channel
from cluster.errors import TransferError
from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from kvtransfer.receiver import Receiver

_Context = aio.ServicerContext[Any, Any]


class RankServicer(rpc.RankServicer):
    """Serves `Receiver` to senders elsewhere, and to the rank 0 that owns its blocks.

    `on_report` is called on the event loop, on rank 0, with what each rank says of its part of a handoff.
    """

    def __init__(self, *, receiver: Receiver | None, on_report: Callable[[pb.ReportRequest], None]) -> None:
        self._receiver = receiver
        self._on_report = on_report

    async def Connect(
        self, request_iterator: AsyncIterator[pb.SenderFrame], context: _Context
    ) -> AsyncIterator[pb.ReceiverFrame]:
        if self._receiver is None:
            await abort_with(context, TransferError("this rank receives no KV"))
        async for frame in self._receiver.connect(request_iterator):
            yield frame

    async def Open(self, request: pb.OpenRequest, context: _Context) -> pb.OpenReply:
        if self._receiver:
            self._receiver.open(request)
        return pb.OpenReply()

    async def Close(self, request: pb.CloseRequest, context: _Context) -> pb.CloseReply:
        if self._receiver:
            await asyncio.to_thread(self._receiver.close, request.handoff)
        return pb.CloseReply()

    async def Report(self, request: pb.ReportRequest, context: _Context) -> pb.ReportReply:
        self._on_report(request)
        return pb.ReportReply()


class Peers:
    """The other ranks of this replica, as one rank sees them. Lives on the event loop."""

    def __init__(self, addresses: list[str], *, rank: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._channels = {r: open_channel(a) for r, a in enumerate(addresses) if r != rank}
        self._stubs = {r: rpc.RankStub(channel) for r, channel in self._channels.items()}

    async def open(self, request: pb.OpenRequest) -> None:
        """Open a handoff on every other rank. Raises ReplicaLost if one does not answer."""
        await self._all("Open", request)

    async def close_handoff(self, handoff: str) -> None:
        """Close a handoff on every other rank; when this returns, none of them writes to its blocks any more."""
        await self._all("Close", pb.CloseRequest(handoff=handoff))

    async def report(self, request: pb.ReportRequest) -> None:
        """Tell rank 0 about this rank's part of a handoff."""
        await self._call(0, "Report", request)

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
