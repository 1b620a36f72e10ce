"""gRPC service through which routers send requests to a replica. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ClusterError, ReplicaLost
from core.types.handoff import Handoff
from core.wire.call_errors import aborting, rejects
from core.wire.messages import prompt_logprobs_to_proto, to_message
from core.wire.thread_events import CallEvents
from engine.scheduler.prompts import KVSource, Prompt
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.rank_transfer import Shipment
from worker.replica_service import ReplicaService
from worker.request_validation import check_streams, prefix_source_of
from worker.step_loop import Command

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class AnswerServicer(rpc.DecodeWorkerServicer):
    """Servicer whose Generate call is the lease of a request's blocks. Serves once `service` is set."""

    def __init__(self) -> None:
        self.service: ReplicaService | None = None

    def register(self, server: aio.Server) -> None:
        """Add the services of the role to a server."""
        rpc.add_DecodeWorkerServicer_to_server(self, server)

    def loaded(self) -> ReplicaService:
        """Return the replica's service. Raises ReplicaLost while the replica is loading."""
        if self.service is None:
            raise ReplicaLost("replica is still loading")
        return self.service

    async def Generate(self, request: pb.GenerateRequest, context: _Context) -> AsyncIterator[pb.GenerateEvent]:
        async with aborting(context):
            service = self.loaded()
            check_streams(request.router, ())
            sequence = await service.sequence_of(request.sequence)
            prefix_source = prefix_source_of(request)
            service.check_takes_work()  # last, because compiling a grammar takes time
            worker, prompt = service.worker, Prompt(sequence, source=_source(request))
            call = _Call(prompt, service.post)
            service.post(lambda: worker.submit(prompt, request.router, call, prefix_source=prefix_source))
            try:
                async for event in call.events:
                    if isinstance(event, Opening):
                        await service.others.open(event)
                    else:
                        yield event
                yield pb.GenerateEvent(finished=pb.Finished(frames=service.num_frames(request.router)))
            finally:
                service.post(lambda: worker.cancel(prompt))

    @rejects
    async def Migrate(self, request: pb.MigrateRequest, context: _Context) -> pb.MigrateReply:
        service = self.loaded()
        check_streams(request.router, ())
        worker, handoff, move = service.worker, service.handoff_of(request.handoff), _Move()
        service.post(lambda: worker.migrate(request.router, request.stream, handoff, move))
        try:
            return await move.reply
        finally:
            if not move.reply.done() or move.reply.cancelled():
                service.post(lambda: worker.cancel_move(request.router, request.stream))

    @rejects
    async def Stop(self, request: pb.StopRequest, context: _Context) -> pb.StopReply:
        check_streams(request.router, request.streams)
        if service := self.service:
            answers, streams = service.worker.answers, list(request.streams)
            service.post(lambda: answers.stop_streams(request.router, streams))
        return pb.StopReply()


class _Call:
    """Listener that passes events of a request from the step thread to its gRPC call."""

    def __init__(self, prompt: Prompt, post: Callable[[Command], None]) -> None:
        """post: runs a command on the step thread."""
        self._prompt = prompt
        self.events: CallEvents[pb.GenerateEvent | Opening] = CallEvents()
        self._post = post

    def reserved(self, handoff: Handoff | None, opening: Opening | None, num_cached: int) -> None:
        if opening:
            self.events.put(opening)
        reserved = to_message(pb.Handoff, handoff) if handoff else None
        waited_s = self._prompt.spent.waited_s if self._prompt.spent else 0.0
        event = pb.Reserved(handoff=reserved, cached_tokens=num_cached, waited_s=waited_s)
        self.events.put(pb.GenerateEvent(reserved=event))

    def started(self, num_tokens: int, *, epoch: int, num_from_peers: int) -> None:
        for part in prompt_logprobs_to_proto(self._prompt.take_scores()):
            self.events.put(pb.GenerateEvent(prompt_logprobs=part))
        spent = None if self._prompt.is_received or not self._prompt.spent else to_message(pb.Spent, self._prompt.spent)
        started = pb.Started(num_tokens=num_tokens, epoch=epoch, fetched_tokens=num_from_peers, spent=spent)
        self.events.put(pb.GenerateEvent(started=started))

    def ended(self, error: ClusterError | None) -> None:
        """End the call after the current step, so that the step's tokens are in the frames first."""
        self._post(lambda: self.events.end(error))


class _Move:
    """Listener that passes the result of a migration from the step thread to its gRPC call."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reply: asyncio.Future[pb.MigrateReply] = self._loop.create_future()

    def moved(self, num_tokens: int, shipment: Shipment, pause_s: float) -> None:
        reply = pb.MigrateReply(moved=True, num_tokens=num_tokens, wire_bytes=shipment.wire_bytes, pause_s=pause_s)
        self._loop.call_soon_threadsafe(self._answer, reply)

    def stays(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._answer, pb.MigrateReply(reason=reason))

    def _answer(self, reply: pb.MigrateReply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


def _source(request: pb.GenerateRequest) -> KVSource:
    if request.prefill_here:
        return KVSource.HERE
    return KVSource.DECODE if request.continues else KVSource.PREFILL
