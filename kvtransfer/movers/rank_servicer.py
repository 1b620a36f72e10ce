"""The gRPC face of one rank towards other ranks: links come in here, and the ranks of a replica speak to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from cluster.wire.channel import abort_with
from cluster.wire.fields import from_message
from cluster.words.errors import TransferError
from kvtransfer.movers.meeting import Meeting
from kvtransfer.movers.receiver import Receiver
from kvtransfer.protocol.frames import Opening


class RankServicer(rpc.RankServicer):
    """Serves `receiver`, once there is one, to senders elsewhere and to the rank 0 that owns its blocks.

    `on_report` is called on the event loop, on rank 0, with what each rank says of its part of a handoff.
    """

    def __init__(self) -> None:
        self.receiver: Receiver | None = None
        self.on_report: Callable[[pb.ReportRequest], None] = lambda report: None
        self.meeting = Meeting()  # of the ranks of this replica, if this is rank 0, and of every sender with `receiver`

    async def Connect(
        self, request_iterator: AsyncIterator[pb.SenderFrame], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReceiverFrame]:
        if self.receiver is None:
            await abort_with(context, TransferError("this rank receives no KV"))
        async for frame in self.receiver.connect(request_iterator):
            yield frame

    async def Open(self, request: pb.OpenRequest, context: aio.ServicerContext[Any, Any]) -> pb.OpenReply:
        if self.receiver:
            self.receiver.open(from_message(Opening, request))
        return pb.OpenReply()

    async def Close(self, request: pb.CloseRequest, context: aio.ServicerContext[Any, Any]) -> pb.CloseReply:
        if self.receiver:
            await asyncio.to_thread(self.receiver.close, request.handoff)
        return pb.CloseReply()

    async def Report(self, request: pb.ReportRequest, context: aio.ServicerContext[Any, Any]) -> pb.ReportReply:
        self.on_report(request)
        return pb.ReportReply()

    async def Tell(self, request: pb.TellRequest, context: aio.ServicerContext[Any, Any]) -> pb.TellReply:
        self.meeting.tell(request.key, request.value)
        return pb.TellReply()

    async def Ask(self, request: pb.AskRequest, context: aio.ServicerContext[Any, Any]) -> pb.AskReply:
        return pb.AskReply(value=await self.meeting.ask_async(request.key))
