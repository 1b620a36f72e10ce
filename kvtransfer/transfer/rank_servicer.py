"""gRPC service of one rank for other ranks: incoming links, handoff control and rendezvous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import TransferError
from core.types.validation import check, check_name
from core.wire.call_errors import aborting, rejects
from core.wire.messages import from_message
from kvtransfer.protocol.frames import Opening
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.rendezvous import Rendezvous
from kvtransfer.transfer.wire_messages import Part, part_from_report

_BEHIND_S = 10.0  # maximum lag of a rank behind rank 0: several slow steps
_MAX_VALUE_BYTES = 64 << 10  # rendezvous values of a process group take some hundred bytes


class RankServicer(rpc.RankServicer):
    """Exposes `receiver`, once it is set, to senders and to the rank 0 that owns its blocks.

    On rank 0, `on_report` is called on the event loop with each rank's report; it raises RequestError for an unknown
    rank. An invalid message ends its call with INVALID_ARGUMENT.
    """

    def __init__(self, steps: StepCount | None = None) -> None:
        """steps: steps that this rank has executed. None: a rank that follows no rank 0."""
        self._steps = steps or StepCount()
        self.receiver: Receiver | None = None
        self.on_report: Callable[[int, Part], None] = lambda rank, part: None
        # Used by the ranks of this replica if this is rank 0, and by every sender to connect with `receiver`.
        self.rendezvous = Rendezvous()

    async def Connect(
        self, request_iterator: AsyncIterator[pb.SenderFrame], context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ReceiverFrame]:
        async with aborting(context):
            if self.receiver is None:
                raise TransferError("this rank receives no KV")
            async for frame in self.receiver.connect(request_iterator):
                yield frame

    @rejects
    async def Open(self, request: pb.OpenRequest, context: aio.ServicerContext[Any, Any]) -> pb.OpenReply:
        if self.receiver:
            opening = self.receiver.checked(from_message(Opening, request))
            await asyncio.to_thread(self._open, self.receiver, opening, request.after_steps)
        return pb.OpenReply()

    def _open(self, receiver: Receiver, opening: Opening, after_steps: int) -> None:
        """Open a handoff after this rank has executed the steps that used the same blocks for other sequences."""
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
        check(len(request.value) <= _MAX_VALUE_BYTES, "value", f"must have at most {_MAX_VALUE_BYTES} bytes")
        self.rendezvous.set(request.key, request.value)
        return pb.TellReply()

    @rejects
    async def Ask(self, request: pb.AskRequest, context: aio.ServicerContext[Any, Any]) -> pb.AskReply:
        check_name(request.key, "key")
        return pb.AskReply(value=await self.rendezvous.get_async(request.key))


class StepCount:
    """Number of steps that rank 0 has broadcast, or that another rank has executed (on a GPU: enqueued).

    The ranks of a replica use it as their common clock. One thread counts, any thread may read.
    """

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()

    @property
    def number(self) -> int:
        return self._number

    def add(self) -> None:
        with self._changed:
            self._number += 1
            self._changed.notify_all()

    def wait_for(self, number: int, *, timeout_s: float) -> None:
        """Wait until `number` steps have been counted. Raises TransferError after `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._number >= number, timeout_s):
                raise TransferError(f"rank executed {self._number} of {number} steps within {timeout_s} s")
