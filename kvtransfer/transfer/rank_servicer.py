"""The gRPC face of one rank towards other ranks: links come in here, and the ranks of a replica speak to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import ClusterError, TransferError
from core.types.validation import check, check_name
from core.wire.call_errors import abort_with, rejects
from core.wire.proto_fields import from_message
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.rendezvous import Rendezvous
from kvtransfer.transfer.step_count import StepCount
from kvtransfer.transfer.wire_messages import Part, part_from_report

_BEHIND_S = 10.0  # so far may a rank be behind rank 0: a step of the slowest, with much to spare
_MAX_WORD_BYTES = 64 << 10  # what a process group leaves for its other ranks takes some hundred


class RankServicer(rpc.RankServicer):
    """Serves `receiver`, once there is one, to senders elsewhere and to the rank 0 that owns its blocks.

    `on_report` is called on the event loop, on rank 0, with what each rank says of its part of a handoff; it raises
    RequestError for a rank that there is not. A message that cannot be meant ends its call with INVALID_ARGUMENT.
    """

    def __init__(self, steps: StepCount | None = None) -> None:
        """steps: that this rank carries out. None: it follows nobody."""
        self._steps = steps or StepCount()
        self.receiver: Receiver | None = None
        self.on_report: Callable[[int, Part], None] = lambda rank, part: None
        self.rendezvous = (
            Rendezvous()
        )  # of the ranks of this replica, if this is rank 0, and of every sender with `receiver`

    async def Connect(
        self, request_iterator: AsyncIterator[pb.SenderFrame], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReceiverFrame]:
        try:
            if self.receiver is None:
                raise TransferError("this rank receives no KV")
            async for frame in self.receiver.connect(request_iterator):
                yield frame
        except ClusterError as error:
            await abort_with(context, error)

    @rejects
    async def Open(self, request: pb.OpenRequest, context: aio.ServicerContext[Any, Any]) -> pb.OpenReply:
        if self.receiver:
            opening = self.receiver.checked(from_message(Opening, request))
            await asyncio.to_thread(self._open, self.receiver, opening, request.after_steps)
        return pb.OpenReply()

    def _open(self, receiver: Receiver, opening: Opening, after_steps: int) -> None:
        """What peers write comes behind what this rank was ordered to do with the same blocks, when they were
        somebody else's."""
        self._steps.wait_for(after_steps, timeout_s=_BEHIND_S)
        receiver.open(opening)

    @rejects
    async def Close(self, request: pb.CloseRequest, context: aio.ServicerContext[Any, Any]) -> pb.CloseReply:
        check_name(request.handoff, "handoff")
        if self.receiver:
            await asyncio.to_thread(self.receiver.close, request.handoff)
        return pb.CloseReply()

    @rejects
    async def Report(self, request: pb.ReportRequest, context: aio.ServicerContext[Any, Any]) -> pb.ReportReply:
        self.on_report(request.rank, part_from_report(request))
        return pb.ReportReply()

    @rejects
    async def Tell(self, request: pb.TellRequest, context: aio.ServicerContext[Any, Any]) -> pb.TellReply:
        check_name(request.key, "key")
        check(len(request.value) <= _MAX_WORD_BYTES, "value", f"must have at most {_MAX_WORD_BYTES} bytes")
        self.rendezvous.tell(request.key, request.value)
        return pb.TellReply()

    @rejects
    async def Ask(self, request: pb.AskRequest, context: aio.ServicerContext[Any, Any]) -> pb.AskReply:
        check_name(request.key, "key")
        return pb.AskReply(value=await self.rendezvous.ask_async(request.key))
